"""Command line `dcp-remote`: one module per command, called by `main`. Imports no torch.

findings and probe are the parts of `dcp-remote bench`.
"""

from __future__ import annotations

from dcp_remote.cli.main import main

__all__ = ["main"]
