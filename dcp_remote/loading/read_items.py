"""Targets for the items of torch's load plan: tensors go into the planner's templates, objects to its `load_bytes`."""

from __future__ import annotations

import io
import itertools
from functools import partial

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_remote.common.geometry import Box
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.engine import Target
from dcp_remote.loading.overlapping_templates import assign_layers
from dcp_remote.loading.planner import RemoteLoadPlanner
from dcp_remote.loading.targets import make_object_target, make_tensor_target, require_writable, stored_layout
from dcp_remote.serialization.files import Files, files_mismatch
from dcp_remote.serialization.opaque import asks_for_files
from dcp_remote.serialization.state_dict import convert_per_rank, unwrap_per_rank


def make_target_layers(
    manifest: Manifest, plan: LoadPlan, planner: LoadPlanner, *, allow_pickle: bool
) -> list[list[Target]]:
    """Make the targets of a plan, in layers that are to be read one after another; makes no request.

    Within a layer no two templates share memory; nearly always there is one layer. Of templates that share memory, as
    tied weights do, the last in the plan wins. Nothing is put into the state before the targets are read.

    A plan of what the manifest lacks, and a template that cannot take what is read, are an `InvalidArgumentError`. The
    templates of a planner that makes them on demand are checked when it makes them, in the thread that reads.
    """
    # Other planners may make a template when they are asked for it, to be copied later, and keep it in memory until it
    # is complete: theirs are not asked for here.
    torchs = ("resolve_tensor", "lookup_tensor", "transform_tensor")
    template_of = planner.lookup_tensor if inherits_methods(planner, DefaultLoadPlanner, torchs) else None
    layer_of: dict[MetadataIndex, int] = {}
    if template_of is not None:
        indices = dict.fromkeys(item.dest_index for item in plan.items if item.type != LoadItemType.BYTE_IO)
        layer_of.update(zip(indices, assign_layers([template_of(index) for index in indices]), strict=True))
    layers: list[list[Target]] = [[] for _ in range(1 + max(layer_of.values(), default=0))]
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            layers[0].append(_make_planner_target(manifest, planner, item, allow_pickle=allow_pickle))
            continue
        tensor, chunk = _find_chunk(manifest, item.storage_index)
        if template_of is not None:
            layout = stored_layout(manifest.tensors.kind_of(tensor))
            require_writable(item.dest_index.fqn, template_of(item.dest_index), layout=layout)
        target = make_tensor_target(
            manifest,
            tensor=tensor,
            chunk=chunk,
            box=Box(tuple(item.storage_offsets), tuple(item.lengths)),
            resolve=partial(planner.resolve_tensor, item),
            commit=partial(planner.commit_tensor, item),
            allow_pickle=allow_pickle,
        )
        layers[layer_of.get(item.dest_index, 0)].append(target)
    return layers


def _find_chunk(manifest: Manifest, index: MetadataIndex) -> tuple[int, int]:
    """Return the numbers of tensor and chunk; `index.index` is a hint, which is checked."""
    tensors = manifest.tensors
    tensor = tensors.index.get(index.fqn)
    if tensor is None:
        raise InvalidArgumentError("There is no tensor of this name in the checkpoint.", tensor=index.fqn)
    first, count = int(tensors.chunk_first[tensor]), int(tensors.chunks[tensor])
    offsets = tuple(index.offset) if index.offset is not None else None
    hinted = [first + index.index] if index.index is not None and 0 <= index.index < count else []
    for chunk in itertools.chain(hinted, range(first, first + count)):
        if offsets is None or tensors.offsets_of(chunk) == offsets:
            return tensor, chunk
    raise InvalidArgumentError("There is no chunk of a tensor at this offset.", tensor=index.fqn, offsets=offsets)


def _make_planner_target(manifest: Manifest, planner: LoadPlanner, item: ReadItem, *, allow_pickle: bool) -> Target:
    name = item.storage_index.fqn
    wanted = item.dest_index.fqn

    def deliver(value: object) -> None:
        value = _convert(manifest, planner, item, value)
        if not inherits_methods(planner, DefaultLoadPlanner, ("load_bytes",)):
            planner.load_bytes(item, _pickle_stream(name, value))
        # As torch's `load_bytes` does, without a copy by pickle.
        elif isinstance(planner, RemoteLoadPlanner):
            planner.put(wanted, value)
        elif planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[wanted], value)
        else:
            planner.state_dict[wanted] = value

    return make_object_target(manifest, name, deliver, allow_pickle=allow_pickle)


def _convert(manifest: Manifest, planner: LoadPlanner, item: ReadItem, value: object) -> object:
    """Return an object in the form of its place in the state, which a planner that renames entries may change."""
    if not isinstance(planner, DefaultLoadPlanner):
        return value
    name, wanted = item.storage_index.fqn, item.dest_index.fqn
    path = planner.mappings.get(wanted, (wanted,))
    if name != wanted and manifest.run is not None:
        value = convert_per_rank((manifest.flatten or {}).get(name, (name,)), path, value)
    if asks_for_files(getattr(planner, "state_dict", {}).get(wanted)):
        own = unwrap_per_rank(path, value)
        if not isinstance(own, Files):
            raise files_mismatch(own, name=wanted)
    return value


def _pickle_stream(name: str, value: object) -> io.BytesIO:
    """Pickle an object for a user's own planner, which may unpickle without restriction: the stream is our own.

    The protocol is 2, torch's own, since a planner may use torch's restricted unpickler, which reads no other. Protocol
    2 loses the fold of a time and the byte order of an array.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            "torch.save cannot pickle an object for the planner. Read it with dcp_remote.load.",
            object=name,
            cause=error,
        ) from error
    stream.seek(0)
    return stream
