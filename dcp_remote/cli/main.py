"""Parse the command line, do the one thing it says, turn errors of ours into one line and an exit code.

Exit codes: 0 done, 1 it failed and the message says why, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from dcp_remote.cli import bench, gc, ls, pin, recover, rm, show
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.gc import GRACE_SECONDS
from dcp_remote.terminal import printable

_FAILED, _USAGE = 1, 2

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # it has no public name


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
        command: Callable[[argparse.Namespace], None] = options.run
        command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (`head`, say) has gone; Python must not complain about it once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except InvalidArgumentError as error:
        return _complain(error, _USAGE)
    except (DcpRemoteError, OSError) as error:  # a full disk behind our output, say
        return _complain(error, _FAILED)
    return 0


def _complain(error: DcpRemoteError | OSError, code: int) -> int:
    print(printable(f"dcp-remote: {error}"), file=sys.stderr)  # a command line talks by printing
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-remote",
        description="Checkpoints of PyTorch training in object storage, looked at and cleaned up without torch.",
    )
    parser.add_argument("--version", action="version", version=f"dcp-remote {version('dcp-remote')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    where = _where()
    for add in (_add_ls, _add_show, _add_gc, _add_rm, _add_pin, _add_recover, _add_bench):
        add(commands, where)
    return parser


def _add_ls(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "ls",
        parents=[where],
        help="list the checkpoints of a run",
        description="List the checkpoints of a run, from its catalog alone: one GET.",
    )
    parser.set_defaults(run=_ls)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def _add_show(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "show",
        parents=[where],
        help="say what a checkpoint holds",
        description="Say what a checkpoint holds, from its manifest alone; of a run, what its newest one holds.",
    )
    parser.set_defaults(run=_show)
    parser.add_argument("--step", metavar="N|NAME", help="of a run: the checkpoint of this step, or of this name")
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="PATTERN",
        help="list the entries of this name or pattern, such as 'model.*'; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def _add_gc(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "gc",
        parents=[where],
        allow_abbrev=False,  # nobody shall delete by half a word
        help="remove what no checkpoint names",
        description="Say which shards no manifest names: what is left of saves that were cut off, failed or replaced. "
        "With --delete they are removed; a save that is under way here at that moment fails then. Where there is no "
        "manifest, a tombstone is put in its place first, which the next save replaces. Of a run: the manifests and "
        "shards that none of its live checkpoints names; a save that is under way begins again then.",
    )
    parser.set_defaults(run=_gc)
    parser.add_argument("--list", action="store_true", help="also print each of them")
    parser.add_argument("--delete", action="store_true", help="remove them; without this nothing is changed")
    parser.add_argument(
        "--grace-hours",
        type=float,
        default=GRACE_SECONDS / 3600,
        metavar="HOURS",
        help="leave what is younger (default: %(default)g)",
    )


def _add_rm(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "rm",
        parents=[where],
        allow_abbrev=False,
        help="let checkpoints of a run go",
        description="Say which checkpoints of a run would go. With --yes they are taken out of its catalog, and then "
        "what no other checkpoint names is deleted.",
    )
    parser.set_defaults(run=_rm)
    parser.add_argument("--step", type=int, action="append", required=True, metavar="N", help="which; repeatable")
    parser.add_argument("--yes", action="store_true", help="do it; without this nothing is changed")
    parser.add_argument("--force", action="store_true", help="also one that is pinned, or the newest")


def _add_pin(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "pin",
        parents=[where],
        allow_abbrev=False,
        help="exempt a checkpoint of a run from retention",
        description="Exempt a checkpoint of a run from retention.",
    )
    parser.set_defaults(run=_pin)
    parser.add_argument("step", type=int, metavar="STEP", help="which checkpoint")
    parser.add_argument("--undo", action="store_true", help="retention may let it go again")


def _add_recover(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "recover",
        parents=[where],
        allow_abbrev=False,
        help="make a lost or damaged catalog again",
        description="Say which checkpoints the manifests of a run tell of, where its catalog.json is lost or damaged. "
        "With --write a catalog of them is written. No job may use the run meanwhile.",
    )
    parser.set_defaults(run=_recover)
    parser.add_argument("--write", action="store_true", help="write it; without this nothing is changed")


def _add_bench(commands: _Commands, where: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "bench",
        parents=[where],
        allow_abbrev=False,
        help="measure what a bucket gives this machine, and what limits it",
        description="Measure latency, bandwidth by connections and conditional writes of a bucket, from this machine, "
        "by objects below a fresh prefix, which are deleted at the end; also on Ctrl-C. Writes a report without "
        "credentials or the name of the bucket, for whoever wants to contribute it.",
    )
    parser.set_defaults(run=_bench)
    parser.add_argument(
        "--bytes",
        type=bench.parse_bytes,
        default=bench.BYTES,
        metavar="N[MiB|GiB]",
        help="how much to put, and to read back, at most (default: 256MiB)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=bench.SECONDS,
        metavar="N",
        help="begin nothing more after so long (default: %(default)g)",
    )
    parser.add_argument("--name", help="what the report calls this place; without it nothing says which one it is")
    parser.add_argument("--output", default=bench.OUTPUT, metavar="FILE", help="the report (default: %(default)s)")


def _where() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("url", help="s3://bucket/checkpoint-or-run, gs://…, az://…, file:///…, or a path")
    where.add_argument("--endpoint-url", help="of a server that speaks S3")
    where.add_argument("--profile", help="of the AWS configuration")
    where.add_argument("--region", help="of the bucket")
    where.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any other storage option; repeatable"
    )
    return where


def _ls(options: argparse.Namespace) -> None:
    ls.run(options.url, storage_options=_storage_options(options), as_json=options.json, out=sys.stdout)


def _show(options: argparse.Namespace) -> None:
    show.run(
        options.url,
        storage_options=_storage_options(options),
        step=options.step,
        patterns=options.key,
        as_json=options.json,
        out=sys.stdout,
    )


def _gc(options: argparse.Namespace) -> None:
    gc.run(
        options.url,
        storage_options=_storage_options(options),
        grace_hours=options.grace_hours,
        delete=options.delete,
        as_list=options.list,
        out=sys.stdout,
    )


def _rm(options: argparse.Namespace) -> None:
    rm.run(
        options.url,
        storage_options=_storage_options(options),
        steps=options.step,
        yes=options.yes,
        force=options.force,
        out=sys.stdout,
    )


def _pin(options: argparse.Namespace) -> None:
    pin.run(
        options.url,
        storage_options=_storage_options(options),
        step=options.step,
        pin=not options.undo,
        out=sys.stdout,
    )


def _recover(options: argparse.Namespace) -> None:
    recover.run(options.url, storage_options=_storage_options(options), write=options.write, out=sys.stdout)


def _bench(options: argparse.Namespace) -> None:
    bench.run(
        options.url,
        storage_options=_storage_options(options),
        bytes_max=options.bytes,
        seconds_max=options.seconds,
        name=options.name,
        output=Path(options.output),
        out=sys.stdout,
    )


def _storage_options(options: argparse.Namespace) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for option in options.option:
        name, equals, value = option.partition("=")
        if not equals:
            raise InvalidArgumentError("An option is written NAME=VALUE.", option=name)
        chosen[name] = value
    named = {"endpoint_url": options.endpoint_url, "profile_name": options.profile, "region_name": options.region}
    return chosen | {name: value for name, value in named.items() if value is not None}
