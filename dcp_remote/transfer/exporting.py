"""`export_checkpoint`: writes a checkpoint as safetensors, or as torch's distributed checkpoint."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from dcp_remote.common.text import join_some
from dcp_remote.common.units import MEMORY_BUDGET_BYTES, WEIGHTS_FILE_BYTES_MAX
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.loading.load_options import Rename
from dcp_remote.manager.progress import Progress, ProgressSetting, check_progress
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import require_budget, require_timeout
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS
from dcp_remote.storage.url import parse_url
from dcp_remote.transfer.checkpoint import LOOK_SECONDS, SavedCheckpoint
from dcp_remote.transfer.safetensors_export import SafetensorsExport
from dcp_remote.transfer.torch_export import TorchExport

# Key of the weights in states.
_KEY = "model"


def export_checkpoint(
    url: str | os.PathLike[str] | ObjectStore,
    folder: str | os.PathLike[str],
    *,
    kind: Literal["safetensors", "torch"] = "safetensors",
    step: int | str | None = None,
    key: str = _KEY,
    dtype: torch.dtype | str | None = None,
    rename: Rename | None = None,
    file_bytes_max: int = WEIGHTS_FILE_BYTES_MAX,
    allow_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    timeout_seconds: float = RANGE_RETRY_SECONDS,
    progress: ProgressSetting = True,
) -> list[Path]:
    """Write a checkpoint to a local folder, in one process; return the paths of the files.

    "safetensors" writes the tensors below `key`, under their names below it, as Transformers does: model.safetensors,
    or model-00001-of-0000N.safetensors and model.safetensors.index.json; and the checkpoint's `files`, such as
    config.json. Tied weights that were saved twice are written twice. Objects below `key`, and `files` whose names are
    those of weights or of an index, are left out, with a warning.
    "torch" writes all entries into one file, as `torch.distributed.checkpoint.FileSystemWriter` does.

    Names, dtypes, all bits and the order are kept, but for `dtype` and `rename`.

    The files are written into a subfolder `.export-…`, and moved to their places when all are whole: last the index,
    .metadata, or the only file of weights. An error removes the subfolder, and the folder if this call made it; after a
    crash they are left behind.

    Costs: the GET of the manifest (for a run up to three), a GET per range of 8 MiB, and one per shard and quarter of
    the budget, for parts of pieces. Each file is read back, and compared with digests of what was written.

    Holds `memory_budget_bytes`; `files` and objects come on top.

    Args:
        url: URL, path or store of a run or of a checkpoint.
        folder: Local folder; made if it does not exist, and must be empty. A URL of object storage is refused.
        kind: Format.
        step: Step or name of the checkpoint of a run; None is the newest.
        key: First parts of the names of the weights; "" takes all tensors by their whole names. Safetensors alone.
        dtype: Floating-point dtype to which floating-point tensors are converted, or its name; None keeps each. A
            warning names tensors with infinite values after a conversion.
        rename: Dict of names below `key`, or of their first parts up to a dot, to new names, or a function of a name;
            None in the place of a name leaves a tensor out. Safetensors alone.
        file_bytes_max: Size of the tensors in a file of weights, in bytes; 5 GB. A larger tensor has a file of its own.
            Safetensors alone.
        allow_pickle: True to write objects that need code to load; torch alone.
        storage_options: Options of the store.
        memory_budget_bytes: Limit of the memory for tensors, in bytes; 256 MiB.
        timeout_seconds: Time for which one request is repeated while the store fails, in seconds; 300, and at most 30
            for the first ones.
        progress: True for a bar of tqdm or a log; False for neither; or a function that gets a `ProgressReport`. Bytes
            that are written and those that are read back count.

    Raises:
        InvalidArgumentError: The folder is not empty or is a URL, there is no tensor below `key`, `rename` leaves none,
            or a tensor (sparse, quantized, of a dtype or name that safetensors lack) cannot be written.
        CheckpointNotFoundError: No checkpoint is committed here.
        CorruptCheckpointError: The checkpoint is damaged, or bytes read back differ.
        UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
        OSError: The folder cannot be written.
    """
    require_budget(memory_budget_bytes)
    require_timeout(timeout_seconds)
    check_progress(progress)
    _require_options(kind, rename, key, file_bytes_max)
    target = _open_folder(folder)
    saved = SavedCheckpoint(
        url,
        step=step,
        dtype=_parse_dtype(dtype),
        storage_options=storage_options,
        allow_pickle=allow_pickle,
        buffer_bytes_max=max(1, memory_budget_bytes // 2),
        look_seconds=min(LOOK_SECONDS, timeout_seconds),
        retry_seconds=timeout_seconds,
    )
    export: SafetensorsExport | TorchExport
    if kind == "torch":
        export = TorchExport(saved)
    else:
        export = SafetensorsExport(saved, key=key, rename=rename, file_bytes_max=file_bytes_max)
    made = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(parents=True, exist_ok=True)
    draft = target / f".export-{uuid.uuid4().hex[:8]}"
    try:
        draft.mkdir()
        _require_empty(target, but=draft)  # another export may have begun here meanwhile
        with Progress(progress, "export", is_coordinator=True) as shown:
            shown.begin(saved.step, 2 * export.total_bytes)
            export.write(draft, shown.add)
            shown.close(f"exported {saved.store.url} to {target}")
        saved.log_overflows()
        return _publish(draft, target, last=export.last_file)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # a folder that is not empty stays: it holds the export, or files of somebody else
            for path in made:
                path.rmdir()


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found: object = vars(torch).get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidArgumentError("dtype must be a floating-point dtype of torch, such as bfloat16.", dtype=dtype)
    return found


def _require_options(kind: str, rename: Rename | None, key: str, file_bytes_max: object) -> None:
    if kind not in ("safetensors", "torch"):
        raise InvalidArgumentError('kind must be "safetensors" or "torch".', kind=kind)
    if kind == "torch" and (rename is not None or key != _KEY):
        raise InvalidArgumentError("rename and key are for safetensors: a folder of torch has all names.", kind=kind)
    if isinstance(file_bytes_max, bool) or not isinstance(file_bytes_max, int) or file_bytes_max <= 0:
        raise InvalidArgumentError(
            "file_bytes_max must be an integer above zero, in bytes.", file_bytes_max=file_bytes_max
        )


def _open_folder(folder: str | os.PathLike[str]) -> Path:
    parsed = parse_url(folder)
    if parsed.scheme != "file":
        raise InvalidArgumentError(
            "An export goes to a local folder, not to object storage. Export to a folder, and upload it by the tool of "
            "the cloud.",
            folder=parsed.canonical,
        )
    target = Path(parsed.path)
    if target.exists() and not target.is_dir():
        raise InvalidArgumentError("The path is that of a file. Name a folder.", folder=str(target))
    if target.is_dir():
        _require_empty(target)
    return target


def _require_empty(target: Path, *, but: Path | None = None) -> None:
    found = sorted(path.name for path in target.iterdir() if path != but)
    if found:
        raise InvalidArgumentError(
            "The folder is not empty. Name another one, or remove what an export that was killed has left (.export-…).",
            folder=str(target),
            found=join_some(found),
        )


def _publish(draft: Path, target: Path, *, last: str) -> list[Path]:
    """Move the files from the draft to their places; `last` is the one without which nothing is loaded."""
    found = sorted((path for path in draft.rglob("*") if path.is_file()), key=lambda path: (path.name == last, path))
    written: list[Path] = []
    for path in found:
        place = target / path.relative_to(draft)
        place.parent.mkdir(parents=True, exist_ok=True)
        written.append(path.rename(place))
    return written
