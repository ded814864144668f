"""`dcp-remote import` and `dcp-remote export`: checkpoints of other formats into a run, and out of one.

The only commands that need torch, which they import when they run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Literal, TextIO, cast

from dcp_remote.common.text import escape_unprintable, format_count, human_bytes
from dcp_remote.storage.url import is_remote

KINDS = ("safetensors", "torch")

# Names by which other tools call dtypes.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def run_import(
    source: str,
    url: str,
    *,
    source_options: Mapping[str, object],
    storage_options: Mapping[str, object],
    step: int,
    name: str | None,
    overwrite: bool,
    start_over: bool,
    allow_pickle: bool,
    as_json: bool,
    out: TextIO,
) -> None:
    """Import a checkpoint, and print what was saved; costs and errors as of `dcp_remote.import_checkpoint`.

    Args:
        source: URL or path of the checkpoint.
        url: URL of the run.
        source_options: Options of the source's store; a source in object storage has those of the run as well.
        storage_options: Options as for `RemoteWriter`; of the source alone, if only the source is in object storage.
        step: Step of the new checkpoint.
        name: Name of the new checkpoint.
        overwrite: Replace the checkpoint of this step.
        start_over: Leave the checkpoints of the run behind, marked as abandoned.
        allow_pickle: Load objects that need code.
        as_json: Print a JSON document instead of text.
        out: Output stream.
    """
    from dcp_remote.transfer import import_checkpoint

    began_seconds = time.monotonic()
    report = import_checkpoint(
        source,
        url,
        step=step,
        name=name,
        overwrite=overwrite,
        start_over=start_over,
        allow_pickle=allow_pickle,
        source_options={**(storage_options if is_remote(source) else {}), **source_options},
        storage_options=storage_options if is_remote(url) or not is_remote(source) else {},
    )
    document = {
        "source": source,
        "url": url,
        "step": report.step,
        "name": name,
        "save_id": report.save_id,
        "bytes": report.total_bytes,
        "seconds": round(time.monotonic() - began_seconds, 3),
    }
    if as_json:
        out.write(json.dumps(document, indent=2) + "\n")
        return
    text = f"imported {source} to {url}: step {report.step}, {human_bytes(report.total_bytes)}, verified"
    out.write(escape_unprintable(text) + "\n")


def run_export(
    url: str,
    folder: str,
    *,
    storage_options: Mapping[str, object],
    step: int | str | None,
    kind: str,
    key: str,
    dtype: str | None,
    rename: Mapping[str, str | None],
    file_bytes_max: int,
    allow_pickle: bool,
    as_json: bool,
    out: TextIO,
) -> None:
    """Export a checkpoint, and print which files were written; costs and errors as of `dcp_remote.export_checkpoint`.

    Args:
        url: URL of a run or checkpoint.
        folder: Local folder.
        storage_options: Options as for `RemoteReader`.
        step: Step or name of a checkpoint of a run; None for the newest.
        kind: "safetensors" or "torch".
        key: First parts of the names of the weights.
        dtype: Name of the dtype to convert to, also bf16, fp16 and fp32; None to keep each.
        rename: New names of tensors below `key`, or of their first parts, by the old ones; None leaves tensors out.
        file_bytes_max: Size of one file of weights, in bytes.
        allow_pickle: Write objects that need code to load.
        as_json: Print a JSON document instead of text.
        out: Output stream.
    """
    from dcp_remote.transfer import export_checkpoint

    began_seconds = time.monotonic()
    written = export_checkpoint(
        url,
        folder,
        kind=cast("Literal['safetensors', 'torch']", kind),
        step=step,
        key=key,
        dtype=_DTYPES.get(dtype or "", dtype),
        rename=rename or None,
        storage_options=storage_options,
        file_bytes_max=file_bytes_max,
        allow_pickle=allow_pickle,
    )
    total_bytes = sum(path.stat().st_size for path in written)
    document = {
        "url": url,
        "folder": folder,
        "kind": kind,
        "files": [os.path.relpath(path, written[-1].parent) for path in written],  # the last one is not in a subfolder
        "bytes": total_bytes,
        "seconds": round(time.monotonic() - began_seconds, 3),
    }
    if as_json:
        out.write(json.dumps(document, indent=2) + "\n")
        return
    text = f"exported {url} to {folder}: {format_count(len(written), 'file')}, {human_bytes(total_bytes)}, verified"
    out.write(escape_unprintable(text) + "\n")
