"""Parser of the arguments of one command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from dcp_remote.format.entry_names import near_names


class CommandParser(argparse.ArgumentParser):
    """Parser that refuses an unknown option by its name, with the usage of the command and a similar option.

    argparse names every argument that it cannot place, also the URL after `--enpoint-url x`, and prints the usage of
    `dcp-remote`. Where an argument is missing as well, argparse names that one alone.
    """

    def parse_known_args(  # type: ignore[override]  # argparse alone calls this, with both by their places
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments of the command; exit with 2 if one is unknown, so that none is returned."""
        options = list(self._option_string_actions)  # private, but argparse has no public list of them
        for argument in takewhile(lambda argument: argument != "--", args or ()):
            name = argument.partition("=")[0]
            is_known = name in options or (self.allow_abbrev and any(option.startswith(name) for option in options))
            if name.startswith("--") and not is_known:
                near = near_names(name[2:], [option[2:] for option in options])
                self.error(f"unknown option {name}" + (f"; similar: --{near[0]}" if near else ""))
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return parsed, left
