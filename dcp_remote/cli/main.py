"""Command line: parse the arguments, run one command, turn errors into one line and an exit code.

Exit codes: 0 success; 1 the command has found what a script should know of, such as damage, or no checkpoint; 2 wrong
or refused call; 3 the store failed, or the output, or the command itself; 130 after Ctrl-C; 141 the reader of the
output closed the pipe. The reason is on standard error.
"""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from dcp_remote.cli.arguments import CommandParser, argument, describe_options, name_options
from dcp_remote.cli.bench import bench
from dcp_remote.cli.cp import cp
from dcp_remote.cli.deletions import prune, rm
from dcp_remote.cli.diff import diff
from dcp_remote.cli.doctor import doctor
from dcp_remote.cli.du import du
from dcp_remote.cli.gc import gc
from dcp_remote.cli.interrupts import INTERRUPTED, watch_interrupts
from dcp_remote.cli.labels import pin, tag
from dcp_remote.cli.ls import ls
from dcp_remote.cli.output import Output, complain
from dcp_remote.cli.recover import recover_catalog
from dcp_remote.cli.report import report
from dcp_remote.cli.show import show
from dcp_remote.cli.transfer import export, import_
from dcp_remote.cli.verify import verify
from dcp_remote.cli.watch import watch
from dcp_remote.errors import (
    CommitUnknownError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    SaveFailedError,
    StorageError,
)

_FOUND, _USAGE, _FAILED, _PIPE_CLOSED = 1, 2, 3, 141  # the last as of a process that SIGPIPE ends

_EXIT_CODES = """exit codes: 0 done; 1 something was found that a script should know of (no such run or checkpoint,
damage, a difference, a failed check); 2 wrong or refused call; 3 the store, the output or the command itself failed:
nothing is known; 130 Ctrl-C"""

# Positional arguments that may be local paths, whose names a shell can complete.
_PATHS = ("url", "other", "source", "folder")


def completion(
    out: Output,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], argument(choices=("bash", "zsh", "fish"), help="shell that reads the script")
    ],
) -> None:
    """Print a script that completes commands and options in a shell.

    Needs `pip install 'dcp-remote[completion]'`. For bash: `eval "$(dcp-remote completion bash)"`, also in ~/.bashrc.
    The first lines of the script tell where zsh and fish look for it.
    """
    try:
        import shtab
    except ImportError:
        raise InvalidArgumentError(
            "Completion needs the package shtab. Install it: pip install 'dcp-remote[completion]'"
        ) from None
    parser, commands = _build_parser()
    for name, command in commands.items():
        command.description = (inspect.getdoc(COMMANDS[name]) or "").partition(".\n")[0]  # beside each name: one line
        for action in command._actions:  # private, but argparse has no public list of them
            if action.dest in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # read by shtab alone
    script = shtab.complete(parser, shell)
    if not out.as_json:
        print(script)
    out.give({"shell": shell, "script": script})


# A command returns True if it has found what the exit code shall tell. The first line of its docstring is its line of
# `dcp-remote --help`, the rest begins its own help.
COMMANDS: Mapping[str, Callable[..., bool | None]] = {
    "ls": ls,
    "show": show,
    "verify": verify,
    "du": du,
    "diff": diff,
    "cp": cp,
    "import": import_,
    "export": export,
    "gc": gc,
    "rm": rm,
    "prune": prune,
    "pin": pin,
    "tag": tag,
    "recover": recover_catalog,
    "bench": bench,
    "doctor": doctor,
    "watch": watch,
    "report": report,
    "completion": completion,
}

# Commands that write nothing to a store, and that Ctrl-C may end at once (not `verify`, which then prints where to go
# on). Their options may be abbreviated, since a mistyped one deletes nothing.
_READING = ("ls", "show", "du", "diff", "watch", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code; None takes the arguments of the process."""
    if sys.stderr is None:  # closed, as by a daemon; Python would print errors to standard output
        sys.stderr = Path(os.devnull).open("w", errors="backslashreplace")  # noqa: SIM115  # until the process ends
    if sys.stdout is None:
        complain("dcp-remote: standard output is closed")
        return _FAILED
    options = vars(_build_parser()[0].parse_args(arguments))
    name, out = options.pop("command"), Output(as_json=options.pop("as_json"))
    command = COMMANDS[name]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the terminal's encoding lacks, as Python does on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        with watch_interrupts(is_reading=name in _READING):
            has_found = command(out, **options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed the pipe, as `head` does. Without a new target for standard output, Python
        # would print another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except DcpRemoteError as error:
        error.reword(describe_options(command))
        complain("dcp-remote: " + name_options(error.message, command) + str(error).removeprefix(error.message))
        return _code_of(error)
    except OSError as error:  # for example, the output goes to a full disk
        complain(f"dcp-remote: {error}")
        return _FAILED
    except Exception:  # noqa: BLE001  # Python's own exit code for it is 1, which says that something was found
        traceback.print_exc()
        return _FAILED
    return _FOUND if has_found else 0


def _code_of(error: DcpRemoteError) -> int:
    if isinstance(error, InvalidArgumentError):
        return _USAGE
    # What is not there was found to be absent; any other failure of the store leaves the question open.
    failures = StorageError | CommitUnknownError | SaveFailedError
    return _FAILED if isinstance(error, failures) and not isinstance(error, ObjectNotFoundError) else _FOUND


def _build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, CommandParser]]:
    """Return the parser, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="dcp-remote",
        description="List, inspect and clean up checkpoints of PyTorch training in object storage.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"dcp-remote {version('dcp-remote')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=CommandParser)
    for name, command in COMMANDS.items():
        first, _, rest = (inspect.getdoc(command) or "").partition("\n")
        one = commands.add_parser(
            name, help=first.rstrip("."), description=f"{first} {rest}", allow_abbrev=name in _READING
        )
        one.add_arguments_of(command)
        one.add_argument("--json", dest="as_json", action="store_true", help="print a JSON document instead of text")
    return parser, commands.choices
