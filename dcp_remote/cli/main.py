"""Command line: parse the arguments, run one command, turn errors into one line and an exit code.

Exit codes: 0 success; 1 failure, with the reason on standard error; 2 wrong or refused call; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from dcp_remote.cli import bench, gc, ls, pin, recover, rm, show, transfer
from dcp_remote.cli.interrupts import INTERRUPTED, watch_interrupts
from dcp_remote.cli.parser import CommandParser
from dcp_remote.cli.selection import parse_step
from dcp_remote.cli.wording import name_options
from dcp_remote.common.text import escape_unprintable
from dcp_remote.common.units import WEIGHTS_FILE_BYTES_MAX
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.run.gc import GRACE_SECONDS
from dcp_remote.storage.limits import LIMIT_OPTIONS

_FAILED, _USAGE = 1, 2

# Commands that write nothing, whatever their options.
_READING = ("ls", "show")

_Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"  # argparse has no public name for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the terminal's encoding lacks, as Python does on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        command: Callable[[argparse.Namespace], None] = options.run
        with watch_interrupts(is_reading=options.command in _READING):
            command(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed the pipe, as `head` does. Without a new target for standard output, Python
        # would print another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except InvalidArgumentError as error:
        return _report_error(error, _USAGE)
    except (DcpRemoteError, OSError) as error:  # OSError: for example, the output goes to a full disk
        return _report_error(error, _FAILED)
    return 0


def _report_error(error: DcpRemoteError | OSError, code: int) -> int:
    text = str(error)
    if isinstance(error, DcpRemoteError):
        text = name_options(error.message) + text.removeprefix(error.message)
    print(escape_unprintable(f"dcp-remote: {text}"), file=sys.stderr)
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-remote",
        description="List, inspect and clean up checkpoints of PyTorch training in object storage.",
    )
    parser.add_argument("--version", action="version", version=f"dcp-remote {version('dcp-remote')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=CommandParser)
    shared = _build_shared_parser()
    for add in (_add_ls, _add_show, _add_import, _add_export, _add_gc, _add_rm, _add_pin, _add_recover, _add_bench):
        add(commands, shared)
    return parser


def _add_ls(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "ls",
        parents=[shared],
        help="list the checkpoints of a run",
        description="List the checkpoints of a run, from its catalog alone: one GET.",
    )
    parser.set_defaults(run=_ls)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def _add_show(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "show",
        parents=[shared],
        help="print the content of a checkpoint",
        description="Print the content of a checkpoint, or of the newest checkpoint of a run, from its manifest alone.",
    )
    parser.set_defaults(run=_show)
    parser.add_argument(
        "--step",
        type=parse_step,
        metavar="N|NAME",
        help="checkpoint of a run, by step or name (default: the newest)",
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="PATTERN",
        help="list the entries that match a name or pattern, such as 'model.*'; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def _add_import(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="save a checkpoint of another format to a run",
        description="Save a checkpoint of torch.distributed.checkpoint, of Hugging Face (safetensors) or of torch.save "
        "to a run, and read it back. A training that saves to this run meanwhile is stopped.",
    )
    parser.set_defaults(run=_import)
    parser.add_argument("source", help="URL or path of a folder, of a file of torch.save, or of a file of safetensors")
    _add_store_arguments(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step of the new checkpoint")
    parser.add_argument("--name", help="name of the new checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint of this step")
    parser.add_argument(
        "--start-over", action="store_true", help="leave the checkpoints of the run behind, marked as abandoned"
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load objects of torch's checkpoints that need code, which the checkpoint names: only where it is trusted",
    )
    parser.add_argument(
        "--source-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="storage option of a source in object storage, beside those of the run; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def _add_export(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "export",
        parents=[shared],
        allow_abbrev=False,
        help="write a checkpoint as safetensors, or as a folder of torch",
        description="Write the weights of a checkpoint to a local folder as Transformers does, or all of it as "
        "torch.distributed.checkpoint does, and read the files back.",
    )
    parser.set_defaults(run=_export)
    parser.add_argument("folder", help="local folder, which must be empty; made if it does not exist")
    parser.add_argument(
        "--step",
        type=parse_step,
        metavar="N|NAME",
        help="checkpoint of a run, by step or name (default: the newest)",
    )
    parser.add_argument("--kind", choices=transfer.KINDS, default=transfer.KINDS[0], help="default: %(default)s")
    parser.add_argument(
        "--key", default="model", help="first parts of the names of the weights; '' for all (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", help="floating-point dtype to convert to, such as bfloat16 or bf16 (default: as saved)"
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="new name of a tensor, or of tensors by the first parts of their names; OLD= leaves them out; repeatable",
    )
    parser.add_argument(
        "--file-bytes-max",
        type=bench.parse_bytes,
        default=WEIGHTS_FILE_BYTES_MAX,
        metavar="SIZE",
        help="size of one file of weights, such as 4GiB or 500MB (default: %(default)s bytes)",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="write objects that need code to load, for --kind torch: only where the checkpoint is trusted",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def _add_gc(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "gc",
        parents=[shared],
        allow_abbrev=False,  # so that a mistyped or shortened option never deletes
        help="remove objects that no checkpoint uses",
        description="Print which objects are orphans: left by interrupted, failed or replaced saves, and used by no "
        "checkpoint. With --delete they are removed. In a run, these are manifests and shards that no live checkpoint "
        "uses, and a save that is under way starts again. At the URL of a single checkpoint, these are shards that its "
        "manifest does not name, and a save that is under way fails. If the manifest is absent, a tombstone is put in "
        "its place first, which the next save replaces.",
    )
    parser.set_defaults(run=_gc)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("--list", action="store_true", help="print also the key and size of each orphan")
    parser.add_argument("--delete", action="store_true", help="remove the orphans; without this nothing is changed")
    parser.add_argument(
        "--grace-hours",
        type=float,
        default=GRACE_SECONDS / 3600,
        metavar="HOURS",
        help="keep orphans younger than this (default: %(default)g)",
    )


def _add_rm(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "rm",
        parents=[shared],
        allow_abbrev=False,
        help="delete checkpoints of a run",
        description="Print which checkpoints of a run would be deleted. With --yes they are removed from the catalog, "
        "and then the objects that no other checkpoint uses are deleted.",
    )
    parser.set_defaults(run=_rm)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument(
        "--step",
        type=parse_step,
        action="append",
        required=True,
        metavar="N|NAME",
        help="checkpoint to delete, by step, name or 'latest'; repeatable",
    )
    parser.add_argument("--yes", action="store_true", help="delete; without this nothing is changed")
    parser.add_argument("--force", action="store_true", help="delete also a pinned checkpoint, or the newest")


def _add_pin(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "pin",
        parents=[shared],
        allow_abbrev=False,
        help="exempt a checkpoint of a run from retention",
        description="Exempt a checkpoint of a run from retention and from replacement by saves without overwrite=True.",
    )
    parser.set_defaults(run=_pin)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("step", type=parse_step, metavar="STEP|NAME", help="step or name of the checkpoint, or latest")
    parser.add_argument("--undo", action="store_true", help="unpin: retention may delete the checkpoint again")


def _add_recover(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "recover",
        parents=[shared],
        allow_abbrev=False,
        help="rebuild a lost or damaged catalog",
        description="Print the catalog that can be rebuilt from the manifests of a run whose catalog.json is lost or "
        "damaged. With --write it is written. No job may use the run meanwhile.",
    )
    parser.set_defaults(run=_recover)
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("--write", action="store_true", help="write the catalog; without this nothing is changed")


def _add_bench(commands: _Commands, shared: CommandParser) -> None:
    parser = commands.add_parser(
        "bench",
        parents=[shared],
        allow_abbrev=False,
        help="measure a bucket from this machine, and print what limits it",
        description="Measure latency, bandwidth by number of connections, and conditional writes of a bucket from this "
        "machine. Writes objects below a fresh prefix and deletes them at the end, also on Ctrl-C. Writes a report "
        "that can be published: it contains neither credentials nor the name of the bucket.",
    )
    parser.set_defaults(run=_bench)
    parser.add_argument(
        "--bytes",
        type=bench.parse_bytes,
        default=bench.BYTES,
        metavar="SIZE",
        help="most bytes to upload, and to download, such as 64MiB (default: 256MiB)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=bench.SECONDS,
        metavar="N",
        help="start no new measurement after this time (default: %(default)g)",
    )
    parser.add_argument("--name", help="name of this bucket or machine in the report (default: none)")
    parser.add_argument(
        "--output", default=bench.OUTPUT, metavar="FILE", help="file for the report (default: %(default)s)"
    )


def _build_shared_parser() -> CommandParser:
    """Return a parser of the arguments that all commands share."""
    parser = CommandParser(add_help=False)
    _add_store_arguments(parser)
    return parser


def _add_store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="s3://bucket/checkpoint-or-run, gs://…, az://…, file:///…, or a path")
    parser.add_argument("--endpoint-url", help="URL of an S3-compatible server")
    parser.add_argument("--profile", help="profile of the AWS configuration")
    parser.add_argument("--region", help="region of the bucket")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any other storage option; repeatable"
    )


def _ls(options: argparse.Namespace) -> None:
    ls.run(options.url, storage_options=_parse_storage_options(options), as_json=options.json, out=sys.stdout)


def _show(options: argparse.Namespace) -> None:
    show.run(
        options.url,
        storage_options=_parse_storage_options(options),
        step=options.step,
        patterns=options.key,
        as_json=options.json,
        out=sys.stdout,
    )


def _import(options: argparse.Namespace) -> None:
    transfer.run_import(
        options.source,
        options.url,
        source_options=_parse_pairs("--source-option", options.source_option),
        storage_options=_parse_storage_options(options),
        step=options.step,
        name=options.name,
        overwrite=options.overwrite,
        start_over=options.start_over,
        allow_pickle=options.allow_pickle,
        as_json=options.json,
        out=sys.stdout,
    )


def _export(options: argparse.Namespace) -> None:
    transfer.run_export(
        options.url,
        options.folder,
        storage_options=_parse_storage_options(options),
        step=options.step,
        kind=options.kind,
        key=options.key,
        dtype=options.dtype,
        rename={old: new or None for old, new in _split_pairs("--rename", options.rename, form="OLD=NEW")},
        file_bytes_max=options.file_bytes_max,
        allow_pickle=options.allow_pickle,
        as_json=options.json,
        out=sys.stdout,
    )


def _gc(options: argparse.Namespace) -> None:
    gc.run(
        options.url,
        storage_options=_parse_storage_options(options),
        grace_hours=options.grace_hours,
        delete=options.delete,
        as_list=options.list,
        as_json=options.json,
        out=sys.stdout,
    )


def _rm(options: argparse.Namespace) -> None:
    rm.run(
        options.url,
        storage_options=_parse_storage_options(options),
        steps=options.step,
        yes=options.yes,
        force=options.force,
        as_json=options.json,
        out=sys.stdout,
    )


def _pin(options: argparse.Namespace) -> None:
    pin.run(
        options.url,
        storage_options=_parse_storage_options(options),
        step=options.step,
        pin=not options.undo,
        as_json=options.json,
        out=sys.stdout,
    )


def _recover(options: argparse.Namespace) -> None:
    recover.run(
        options.url,
        storage_options=_parse_storage_options(options),
        write=options.write,
        as_json=options.json,
        out=sys.stdout,
    )


def _bench(options: argparse.Namespace) -> None:
    bench.run(
        options.url,
        storage_options=_parse_storage_options(options),
        bytes_max=options.bytes,
        seconds_max=options.seconds,
        name=options.name,
        output=Path(options.output),
        out=sys.stdout,
    )


def _parse_storage_options(options: argparse.Namespace) -> dict[str, object]:
    parsed = _parse_pairs("--option", options.option)
    named = {"endpoint_url": options.endpoint_url, "profile_name": options.profile, "region_name": options.region}
    return parsed | {name: value for name, value in named.items() if value is not None}


def _parse_pairs(option: str, pairs: Sequence[str]) -> dict[str, object]:
    return {name: _parse_value(name, value) for name, value in _split_pairs(option, pairs, form="NAME=VALUE")}


def _split_pairs(option: str, pairs: Sequence[str], *, form: str) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            # Not the text itself, which may be a secret.
            raise InvalidArgumentError(f"{option} must have the form {form}; one has no equals sign.")
        yield name, value


def _parse_value(name: str, value: str) -> object:
    """Return a flag for `true` and `false`, a number for a limit or a time, else the text."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if name in LIMIT_OPTIONS or name.endswith("_seconds"):
        for number in (int, float):
            with suppress(ValueError):
                return number(value)
    return value
