"""Command line `dcp-remote`: one module per command or pair of commands, called by `main`. Imports no torch.

arguments declares and parses, output prints, html_page makes the page of `report`, interrupts answers Ctrl-C. deletions
has `rm` and `prune`, labels `pin` and `tag`, transfer `import` and `export`; main itself has `completion`.
"""

from __future__ import annotations

from dcp_remote.cli.main import main

__all__ = ["main"]
