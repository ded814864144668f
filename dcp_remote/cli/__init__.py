"""The command line: `dcp-remote show <url>`. Starts without torch; needs nothing but the manifest."""

from __future__ import annotations

from dcp_remote.cli.main import main

__all__ = ["main"]
