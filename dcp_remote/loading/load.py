"""`load`: reads a checkpoint without a template, in one process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from dcp_remote.common.geometry import Box
from dcp_remote.common.tracebacks import hides_frames
from dcp_remote.common.units import MEMORY_BUDGET_BYTES
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format.empty_dicts import empty_dicts
from dcp_remote.format.entry_names import no_match_error
from dcp_remote.format.manifest import RAW, Manifest
from dcp_remote.format.segments import find_segments
from dcp_remote.loading.engine import Target, read_targets
from dcp_remote.loading.load_options import LoadOptions, Path, Patterns, Rename, rename_path
from dcp_remote.loading.targets import make_box_targets, make_object_target, make_stream_target
from dcp_remote.run.lookup import join_segments, read_manifest
from dcp_remote.serialization.state_dict import unwrap_per_rank
from dcp_remote.serialization.tensors import dtype_name, empty_tensor, parse_dtype
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import Location, require_budget, require_timeout
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS


@hides_frames
def load(
    url: str | os.PathLike[str] | ObjectStore,
    *,
    step: int | str | None = None,
    keys: Patterns | None = None,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    timeout_seconds: float = RANGE_RETRY_SECONDS,
) -> dict[str, Any]:
    """Read a checkpoint, or part of it, without a template: whole tensors on the CPU, in the nesting that was saved.

    For one process: a notebook, an export, an inspection. One GET for the manifest (for a run up to two more, and from
    a cloud perhaps one in vain, since requests are sent at once), one per segment of what is chosen where the manifest
    is in segments, and one per range of 8 MiB.

    Keys are strings, as torch flattens them: an optimizer's own `state_dict()`, whose keys are integers, comes back
    with "0" and "1", which `load_state_dict` accepts silently and does not use. Restore an optimizer by `dcp.load`. An
    empty dictionary that plain `dcp.save` saved is missing (in a list, it is None), since torch's planner leaves it
    out. Saves of a `CheckpointManager` with torch's planner keep it.

    Args:
        url: URL, path or store, as for `RemoteReader`.
        step: Step of a run, or name of a checkpoint in it; None, "latest" or "last" is the newest.
        keys: Names, or patterns of names such as `"model.*"`, as `dcp-remote show` lists them; None reads everything.
            Entries that were not chosen are left out. In a list they are None, so that chosen entries keep their index.
        include: The same as `keys`, under the name that `CheckpointManager.restore` has for it; give one of them.
        exclude: Names or patterns to leave out.
        rename: Dict of names, or of their first parts up to a dot, to new names, or a function of a name; None in the
            place of a name leaves an entry out. Patterns take new names.
        dtype: Floating-point type to which tensors of other floating-point types are converted; None keeps theirs.
        allow_pickle: True to load objects that need code.
        storage_options: Options of the store, as for `RemoteWriter`.
        memory_budget_bytes: Limit of the buffers beyond the returned values, in bytes; 256 MiB.
        timeout_seconds: Time for which one request is retried while the store fails, in seconds; 300.

    Raises:
        InvalidArgumentError: A name or pattern matches nothing (similar names are given), a tensor does not fit into
            memory (nothing was read then), or a limit is not above zero.
        CheckpointNotFoundError: No checkpoint is committed here.
        CorruptCheckpointError: Bytes are not those that were written.
        UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
    """
    require_budget(memory_budget_bytes)
    require_timeout(timeout_seconds)
    if keys is not None and include is not None:
        raise InvalidArgumentError("keys and include are two names of one argument. Give one of them.")
    options = LoadOptions(include=include if keys is None else keys, exclude=exclude, rename=rename)
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise InvalidArgumentError("dtype must be a floating-point torch.dtype, such as torch.bfloat16.", dtype=dtype)
    store = Location.of(url, storage_options).store
    manifest = read_manifest(store, step=step, retry_seconds=timeout_seconds, whole=False)
    names = list(manifest.names())
    tensors, empty = manifest.tensors, empty_dicts(manifest.flatten, names)
    names += empty
    paths = _choose_paths(manifest, names, options)
    names = list(paths)
    shapes = {name: tensors.shape_of(tensors.index[name]) for name in names if name in tensors.index}
    # The stream of a tensor without elements is read, too.
    boxes = {name: [((0,) * len(shape), tuple(max(size, 1) for size in shape))] for name, shape in shapes.items()}
    needed = find_segments(manifest, boxes)
    manifest = join_segments(store, manifest, needed, retry_seconds=timeout_seconds)
    flat: dict[str, Any] = {name: {} if name in empty else None for name in names}
    targets: list[Target] = []
    for name in (name for name in names if name not in empty):
        number = manifest.tensors.index.get(name)
        if number is None:
            deliver = partial(flat.__setitem__, name)
            targets.append(make_object_target(manifest, name, deliver, allow_pickle=allow_pickle))
        else:
            targets += _make_tensor_targets(manifest, number, flat, dtype=dtype, allow_pickle=allow_pickle)
    read_targets(store, manifest, targets, memory_budget_bytes=memory_budget_bytes, retry_seconds=timeout_seconds)
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        path = (manifest.flatten or {}).get(name, (name,))
        set_element(nested, paths[name], unwrap_per_rank(path, value) if manifest.run is not None else value)
    return nested


def _choose_paths(manifest: Manifest, names: Sequence[str], options: LoadOptions) -> dict[str, Path]:
    """Return the names of the entries and empty dicts that are chosen, each with its path in the returned state."""
    flatten = manifest.flatten or {}
    renamed, _ = options.rename_entries(names)
    paths = {new: _new_path(flatten.get(name, (name,)), name, new) for name, new in renamed.items()}
    names_chosen, unmatched = options.choose(paths)
    if unmatched:
        raise no_match_error(unmatched[0], paths, paths if flatten else {})
    chosen = set(names_chosen)
    found = {name: paths[new] for name, new in renamed.items() if new in chosen}
    if options.rename is not None:
        _require_tree(found)
    return found


def _new_path(path: Path, name: str, new: str) -> Path:
    """Return the path of an entry, or of an empty dict, under its new name."""
    if name == new:
        return path
    is_entry = name == ".".join(map(str, path))
    return rename_path(path, new if is_entry else new.removesuffix(".{}"))


def _require_tree(paths: Mapping[str, Path]) -> None:
    """Refuse a renamed state in which a value lies below another value, or in its place."""
    names: dict[Path, str] = {}
    for name, path in paths.items():
        names.setdefault(path, name)
    for name, path in paths.items():
        other = next((names[path[:n]] for n in range(1, len(path) + 1) if names.get(path[:n], name) != name), None)
        if other is not None:
            raise InvalidArgumentError(
                "rename puts an entry in the place of another, or below.", entry=name, other=other
            )


def _make_tensor_targets(
    manifest: Manifest, number: int, flat: dict[str, Any], *, dtype: torch.dtype | None, allow_pickle: bool
) -> list[Target]:
    """Make the targets that read a whole tensor into `flat`: one per chunk, or one for a stream."""
    tensors = manifest.tensors
    name, kind, sizes = tensors.names[number], tensors.kind_of(number), tensors.shape_of(number)
    first = int(tensors.chunk_first[number])
    saved = parse_dtype(kind.dtype)
    wanted = dtype if dtype is not None and saved.is_floating_point else saved
    is_stream = kind.encoding != RAW
    chunks = range(first, first + int(tensors.chunks[number]))
    elements = sum(math.prod(tensors.sizes_of(chunk)) for chunk in chunks)
    if elements != math.prod(sizes) or (is_stream and not chunks):
        raise CorruptCheckpointError("Chunks of a tensor are in no segment. Use another checkpoint.", tensor=name)
    if is_stream:

        def deliver(tensor: torch.Tensor) -> None:
            flat[name] = tensor.to(wanted)

        return [make_stream_target(manifest, tensor=number, chunk=first, deliver=deliver, allow_pickle=allow_pickle)]
    try:
        whole = flat[name] = empty_tensor(wanted, sizes)
    except RuntimeError as error:
        # torch's CPU allocator raises RuntimeError, which does not name the tensor.
        raise InvalidArgumentError(
            "A tensor does not fit into the memory of this process. Choose what to load by `keys`, or load into the "
            "shards of several ranks with RemoteReader.",
            tensor=name,
            bytes=math.prod(sizes) * wanted.itemsize,
            shape=sizes,
            dtype=dtype_name(wanted),
            cause=error,
        ) from error
    return make_box_targets(manifest, number, Box((0,) * len(sizes), sizes), whole)
