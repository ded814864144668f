"""Command line `dcp-remote`: one module per command, called by `main`. Imports no torch.

arguments declares and parses, output prints, html_page draws, interrupts answers Ctrl-C, transfer has two commands.
"""

from __future__ import annotations

from dcp_remote.cli.main import main

__all__ = ["main"]
