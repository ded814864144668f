"""`dcp-remote import` and `dcp-remote export`, which need torch, and import it when they run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated, Literal

from dcp_remote.cli.arguments import (
    AddPair,
    SourceOptions,
    Step,
    StorageOptions,
    Url,
    argument,
    flag,
    parse_bytes,
    parse_pair,
    split_options,
)
from dcp_remote.cli.output import Output
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.common.units import WEIGHTS_FILE_BYTES_MAX

# Names by which other tools call dtypes.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def import_(
    out: Output,
    source: Annotated[
        str, argument(help="URL or path of a folder, of a file of torch.save, or of a file of safetensors")
    ],
    url: Url,
    *,
    step: Annotated[int, argument(type=int, metavar="N", help="step of the new checkpoint")],
    name: Annotated[str | None, argument(help="name of the new checkpoint")] = None,
    overwrite: Annotated[bool, flag("replace the checkpoint of this step")] = False,
    start_over: Annotated[bool, flag("leave the checkpoints of the run behind, marked as abandoned")] = False,
    allow_pickle: Annotated[
        bool, flag("load objects that need code, which the checkpoint names: only where it is trusted")
    ] = False,
    source_options: SourceOptions = None,
    storage_options: StorageOptions = None,
) -> None:
    """Save a checkpoint of another format to a run.

    Saves a checkpoint of torch.distributed.checkpoint, of Hugging Face (safetensors) or of torch.save, and reads it
    back. A training that saves to this run meanwhile is stopped.
    """
    from dcp_remote.transfer import import_checkpoint

    began_seconds = time.monotonic()
    of_source, of_run = split_options(source, url, source_options, storage_options)
    report = import_checkpoint(
        source,
        url,
        step=step,
        name=name,
        overwrite=overwrite,
        start_over=start_over,
        allow_pickle=allow_pickle,
        source_options=of_source,
        storage_options=of_run,
    )
    out.say(f"imported {source} to {url}: step {report.step}, {human_bytes(report.total_bytes)}, verified")
    out.give(
        {
            "source": source,
            "url": url,
            "step": report.step,
            "name": name,
            "save_id": report.save_id,
            "bytes": report.total_bytes,
            "seconds": round(time.monotonic() - began_seconds, 3),
        }
    )


def export(
    out: Output,
    url: Url,
    folder: Annotated[str, argument(help="local folder, which must be empty; made if it does not exist")],
    *,
    step: Step = None,
    kind: Annotated[
        Literal["safetensors", "torch"],
        argument(choices=("safetensors", "torch"), help="files as Transformers or as torch reads them"),
    ] = "safetensors",
    key: Annotated[
        str, argument(help="first parts of the names of the weights; '' for all (default: %(default)s)")
    ] = "model",
    dtype: Annotated[
        str | None,
        argument(help="floating-point dtype to convert to, such as bfloat16 or bf16 (default: as saved)"),
    ] = None,
    rename: Annotated[
        Mapping[str, str] | None,
        argument(
            type=parse_pair,
            action=AddPair,
            metavar="OLD=NEW",
            help="new name of a tensor, or of tensors by the first parts of their names; OLD= leaves them out; "
            "repeatable",
        ),
    ] = None,
    file_bytes_max: Annotated[
        int,
        argument(
            type=parse_bytes,
            metavar="SIZE",
            help="size of one file of weights, such as 4GiB or 500MB (default: %(default)s bytes)",
        ),
    ] = WEIGHTS_FILE_BYTES_MAX,
    allow_pickle: Annotated[
        bool, flag("write objects that need code to load, for --kind torch: only where the checkpoint is trusted")
    ] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Write a checkpoint as safetensors, or as a folder of torch.

    Writes the weights of a checkpoint to a local folder as Transformers does, or all of it as
    torch.distributed.checkpoint does, and reads the files back.
    """
    from dcp_remote.transfer import export_checkpoint

    began_seconds = time.monotonic()
    written = export_checkpoint(
        url,
        folder,
        kind=kind,
        step=step,
        key=key,
        dtype=_DTYPES.get(dtype or "", dtype),
        rename={old: new or None for old, new in rename.items()} if rename else None,
        storage_options=storage_options,
        file_bytes_max=file_bytes_max,
        allow_pickle=allow_pickle,
    )
    total_bytes = sum(path.stat().st_size for path in written)
    out.say(f"exported {url} to {folder}: {format_count(len(written), 'file')}, {human_bytes(total_bytes)}, verified")
    out.give(
        {
            "url": url,
            "folder": folder,
            "kind": kind,
            "files": [os.path.relpath(path, written[-1].parent) for path in written],  # the last one lies at the top
            "bytes": total_bytes,
            "seconds": round(time.monotonic() - began_seconds, 3),
        }
    )
