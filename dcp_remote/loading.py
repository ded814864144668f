"""`load`: a checkpoint read without a template, by one process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from dcp_remote.checkpoint import read_manifest
from dcp_remote.downloads import RANGE_RETRY_SECONDS
from dcp_remote.empty_dicts import empty_dicts
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.location import Location, require_budget, require_timeout
from dcp_remote.manifest import RAW, Manifest
from dcp_remote.names import chosen_names
from dcp_remote.per_rank import unwrapped
from dcp_remote.ranges import Box
from dcp_remote.read_plan import Want
from dcp_remote.reading import Target, read_or_explain
from dcp_remote.serialization import decode_tensor, dtype_name, dtype_of, empty_tensor, narrow
from dcp_remote.storage import ObjectStore
from dcp_remote.targets import BytesTarget, TensorTarget, object_targets, want_bytes
from dcp_remote.transfer import MEMORY_BUDGET_BYTES


def load(
    url: str | os.PathLike[str] | ObjectStore,
    *,
    step: int | str | None = None,
    keys: str | Sequence[str] | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    timeout_seconds: float = RANGE_RETRY_SECONDS,
) -> dict[str, Any]:
    """Read a checkpoint, or part of it, without a template: whole tensors on the CPU, in the nesting that was saved.

    For one process: a notebook, an export, an inspection. One GET for the manifest (of a run up to two more), and one
    per range of 8 MiB.

    Keys are strings, as torch flattens them: an optimizer's own `state_dict()`, whose keys are integers, comes back
    with "0" and "1", which `load_state_dict` takes without a word and does not use. Restore one by `dcp.load`. An empty
    dictionary that plain `dcp.save` saved is missing (in a list it is None): torch's planner leaves it out. Saves of a
    `CheckpointManager` keep it, unless its planner is one of the user's own.

    Args:
        url: As for `RemoteReader`.
        step: Of a run: a step, or a checkpoint's name; None is its newest.
        keys: Names, or patterns of them such as `"model.*"`, as `dcp-remote show` lists them; None reads everything.
            What was not chosen is left out; but places of a list that were not chosen are None, so that what was
            chosen keeps its index.
        allow_pickle: Also load objects that only code can load.
        storage_options: As for `RemoteWriter`.
        memory_budget_bytes: Bound of the buffers beyond what is returned.
        timeout_seconds: How long one request is tried again while the store fails.

    Raises:
        InvalidArgumentError: A name or pattern that fits nothing (says what is near), a tensor that does not fit into
            memory (nothing was read then), or a bound that is not above zero.
        CheckpointNotFoundError: No checkpoint is committed here.
        CorruptCheckpointError: Bytes are not those that were written.
    """
    require_budget(memory_budget_bytes)
    require_timeout(timeout_seconds)
    store = Location.of(url, storage_options).store
    manifest = read_manifest(store, step=step, retry_seconds=timeout_seconds)
    names = list(manifest.names())
    empty = empty_dicts(manifest.flatten, names)
    names += empty
    if keys is not None:
        names = chosen_names(names, [keys] if isinstance(keys, str) else keys, paths=manifest.flatten)
    flat: dict[str, Any] = {name: {} if name in empty else None for name in names}
    targets: list[Target] = []
    for name in (name for name in names if name not in empty):
        number = manifest.tensors.index.get(name)
        if number is None:
            targets += object_targets(manifest, name, partial(flat.__setitem__, name), allow_pickle=allow_pickle)
        else:
            targets += _whole_tensor(manifest, number, flat, allow_pickle=allow_pickle)
    read_or_explain(store, manifest, targets, memory_budget_bytes=memory_budget_bytes, retry_seconds=timeout_seconds)
    if manifest.flatten is None:
        return flat
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        path = manifest.flatten.get(name, (name,))
        set_element(nested, path, unwrapped(path, value) if manifest.run is not None else value)
    return nested


def _whole_tensor(manifest: Manifest, number: int, flat: dict[str, Any], *, allow_pickle: bool) -> list[Target]:
    tensors = manifest.tensors
    name, kind = tensors.names[number], tensors.kind_of(number)
    first = int(tensors.chunk_first[number])
    if kind.encoding != RAW:
        want = Want(int(tensors.piece_first[first]), int(tensors.piece_first[first + 1]), None)

        def done(data: memoryview) -> None:
            flat[name] = decode_tensor(
                name,
                kind.encoding,
                data,
                dtype=kind.dtype,
                sizes=tensors.shape_of(number),
                allow_pickle=allow_pickle,
            )

        return [BytesTarget(name, want, length=want_bytes(manifest, want), done=done)]
    whole = flat[name] = _empty(name, dtype_of(kind.dtype), tensors.shape_of(number))
    targets: list[Target] = []
    for chunk in range(first, first + int(tensors.chunks[number])):
        sizes = tensors.sizes_of(chunk)
        if all(sizes):
            part = narrow(whole, Box(tensors.offsets_of(chunk), sizes))
            targets.append(
                TensorTarget(
                    manifest,
                    tensor=number,
                    chunk=chunk,
                    box=Box((0,) * len(sizes), sizes),
                    resolve=partial(_itself, part),
                    commit=_nothing,
                )
            )
    return targets


def _empty(name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    try:
        return empty_tensor(dtype, sizes)
    except RuntimeError as error:
        # What torch's allocator raises on the CPU; of the tensor it says nothing.
        raise InvalidArgumentError(
            "A tensor does not fit into the memory of this process. Choose what to load by `keys`, or load into the "
            "shards of several ranks with RemoteReader.",
            tensor=name,
            bytes=math.prod(sizes) * dtype.itemsize,
            shape=sizes,
            dtype=dtype_name(dtype),
            cause=error,
        ) from error


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing(_tensor: torch.Tensor) -> None:
    """A destination of our own needs no commit."""
