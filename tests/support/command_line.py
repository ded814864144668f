"""Calls of the command line in this process, and what each printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dcp_remote.cli import main
from dcp_remote.errors import PermissionDeniedError, StorageError
from dcp_remote.storage.wrapper import WrappedStore


@dataclass(frozen=True, slots=True)
class Shown:
    """Output of a command."""

    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Return the lines of standard output."""
        return self.out.splitlines()

    @property
    def document(self) -> Any:
        """Return the JSON document on standard output."""
        return json.loads(self.out)


class CommandLine:
    """Command line whose output is captured."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object, code: int = 0) -> Shown:
        """Run a command, which ends with this exit code."""
        self._capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code, arguments
        captured = self._capsys.readouterr()
        return Shown(captured.out, captured.err)

    def fail(self, *arguments: object, code: int = 1, says: str) -> None:
        """Run a command, which prints nothing but one line of error."""
        shown = self.run(*arguments, code=code)
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert shown.err.startswith("dcp-remote: ")
        assert shown.err.removesuffix("\n").isprintable()
        assert says in shown.err

    def refuse(self, *arguments: object, says: str = "error: ") -> None:
        """Give a wrong command line, of which the usage and the reason are printed."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        assert caught.value.code == 2
        assert captured.out == ""
        assert captured.err.startswith(f"usage: dcp-remote {arguments[0]} ")
        assert says in captured.err.splitlines()[-1]


class KeepingStore(WrappedStore):
    """Store that denies all deletions."""

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        return {key: PermissionDeniedError("An injected\n403.", key=key) for key in keys}


def open_with(wrap: Callable[[Any], Any]) -> Callable[[object, object], Any]:
    """Return an `open_store` whose store is wrapped."""
    from dcp_remote.storage import open_store

    return lambda url, options: wrap(open_store(url, options))  # type: ignore[arg-type]  # as the command gives them
