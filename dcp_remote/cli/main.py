"""Parse the command line, do the one thing it says, turn errors of ours into one line and an exit code.

Exit codes: 0 done, 1 it failed and the message says why, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from dcp_remote.cli import show
from dcp_remote.cli.terminal import printable
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError

_FAILED, _USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding has no bytes for is escaped too, as Python does on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        show.run(
            options.url,
            storage_options=_storage_options(options),
            patterns=options.key,
            as_json=options.json,
            out=sys.stdout,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (`head`, say) has gone; Python must not complain about it once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except InvalidArgumentError as error:
        return _complain(error, _USAGE)
    except DcpRemoteError as error:
        return _complain(error, _FAILED)
    return 0


def _complain(error: DcpRemoteError, code: int) -> int:
    print(printable(f"dcp-remote: {error}"), file=sys.stderr)  # a command line talks by printing
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-remote", description="Checkpoints of PyTorch training in object storage, looked at without torch."
    )
    parser.add_argument("--version", action="version", version=f"dcp-remote {version('dcp-remote')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    shown = commands.add_parser(
        "show",
        help="say what a checkpoint holds",
        description="Say what a checkpoint holds, from its manifest alone: one GET.",
    )
    shown.add_argument("url", help="s3://bucket/checkpoint, gs://…, az://…, file:///…, or a path")
    shown.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="PATTERN",
        help="list the entries of this name or pattern, such as 'model.*'; repeatable",
    )
    shown.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    shown.add_argument("--endpoint-url", help="of a server that speaks S3")
    shown.add_argument("--profile", help="of the AWS configuration")
    shown.add_argument("--region", help="of the bucket")
    shown.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any other storage option; repeatable"
    )
    return parser


def _storage_options(options: argparse.Namespace) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for option in options.option:
        name, equals, value = option.partition("=")
        if not equals:
            raise InvalidArgumentError("An option is written NAME=VALUE.", option=name)
        chosen[name] = value
    named = {"endpoint_url": options.endpoint_url, "profile_name": options.profile, "region_name": options.region}
    return chosen | {name: value for name, value in named.items() if value is not None}
