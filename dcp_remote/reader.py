"""RemoteReader: a checkpoint read back by torch, at any world size, every byte verified.

A reader does no collective of its own: torch does not tell it the process group, and a collective that somebody does
not join is a hang. Every rank reads the manifest, then just the ranges that it needs.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_remote.aliases import layers
from dcp_remote.checkpoint import read_manifest
from dcp_remote.crossing import crosses_ranks, portable
from dcp_remote.dcp_metadata import to_dcp_metadata
from dcp_remote.downloads import RANGE_RETRY_SECONDS
from dcp_remote.errors import (
    CommitConflictError,
    InvalidArgumentError,
)
from dcp_remote.location import (
    Here,
    Location,
    Whereabouts,
    is_location,
    require_budget,
    require_shared,
    require_timeout,
)
from dcp_remote.manifest import Manifest
from dcp_remote.ranges import Box
from dcp_remote.reading import Target, read_or_explain
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.retrying import Deadline
from dcp_remote.targets import object_targets, require_writable, stored_layout, tensor_target
from dcp_remote.transfer import MEMORY_BUDGET_BYTES

logger = logging.getLogger(__name__)


class _Here(Here):
    """The load of this thread."""

    def __init__(self, last: Whereabouts) -> None:
        super().__init__(last)
        self.load_id: str | None = None
        self.manifest: Manifest | None = None


class RemoteReader(StorageReader):
    """Reads a checkpoint: `dcp.load(state, storage_reader=RemoteReader("s3://bucket/checkpoint"))`.

    Works at any world size and with any sharding of the template. Each rank makes one GET for the manifest (of a run up
    to two more, to find it), one per range of at most 8 MiB that it needs, and one small one per shard of which it
    needs only parts of pieces. No code
    runs on load. If it raises, the template holds parts of the checkpoint and must not be used.

    A reader can be used for several loads, one after another, or at a time from several threads. It pickles its
    configuration, with credentials that were given by hand, and never a connection.

    Args:
        url: As for `RemoteWriter`; or that of a run, which `CheckpointManager` saves into.
        step: Of a run: a step, or a checkpoint's name; None is its newest.
        allow_pickle: Also load objects that only code can load; they can do anything to this process.
        storage_options: As for `RemoteWriter`.
        memory_budget_bytes: Bound of the buffers in memory beyond the state, per rank.
        timeout_seconds: How long one request is tried again while the store fails. A load has no deadline: as long as
            bytes arrive, it goes on.

    Raises:
        InvalidArgumentError: The URL or an option is wrong; no request is made here.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        step: int | str | None = None,
        allow_pickle: bool = False,
        storage_options: Mapping[str, object] | None = None,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        timeout_seconds: float = RANGE_RETRY_SECONDS,
    ) -> None:
        """See the class."""
        super().__init__()
        require_budget(memory_budget_bytes)
        require_timeout(timeout_seconds)
        self._step = step
        self._timeout_seconds = timeout_seconds
        # A load has none, as long as bytes arrive; that of a run is one of many ranks, which may give it up.
        self._deadline: Deadline | None = None
        self._allow_pickle = allow_pickle
        self._memory_budget_bytes = memory_budget_bytes
        self._here = _Here(Whereabouts(Location.of(url, storage_options)))

    def __repr__(self) -> str:
        """The URL; never an option."""
        return f"RemoteReader({self._store.url!r})"

    @property
    def _store(self) -> ObjectStore:
        return self._here.location.store

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The URL or path of the checkpoint, as it was given; torch's logger reads it."""
        return self._here.location.checkpoint_id

    @property
    def load_id(self) -> str | None:
        """Of the load under way, or the last one."""
        return self._here.load_id

    # ---- torch's protocol, in the order in which torch calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on to another checkpoint in this thread, with the same options; None keeps the URL. Makes no request.

        What cannot be opened is told with the failures of `read_metadata`, by each load until a later call names what
        can. Threads that are new begin where the last call of any thread led.
        """
        self._here.manifest = None
        self._here.move_to(checkpoint_id)

    # Not named `kwargs`: torch would take it for leave to try again with `rank=`, and then to drop the collectives on
    # this rank alone, which hangs all of them (state_dict_loader.py of torch 2.13).
    @crosses_ranks
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Read and check the manifest; one GET, on every rank.

        A failure is raised by whoever uses what is returned: `set_up_storage_reader`, in a load. What is raised *here*
        torch replaces by an AssertionError, and nobody could tell a missing checkpoint from a store that is down.

        Raises:
            CheckpointNotFoundError: When used: no checkpoint is committed here.
            CorruptCheckpointError: When used: the manifest is damaged.
            UnsupportedFormatError: When used: a newer version wrote it.
            InvalidArgumentError: When used: `reset` was given what cannot be opened, or a plain path where this
                reader's URL is not one.
        """
        self._here.load_id = os.urandom(16).hex()
        self._here.manifest = None
        try:
            self._here.raise_refusal()
            require_shared(self._here.location)
            manifest = self._find()
            metadata = to_dcp_metadata(manifest)
        except Exception as error:  # noqa: BLE001  # kept, to be raised when it is used
            return _UnreadMetadata(portable(error))
        self._here.manifest = manifest
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=manifest.save_id, load_id=self._here.load_id
        )
        return metadata

    @crosses_ranks
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        """Nothing to set up: `read_metadata` has read all there is, or raises here what it could not raise there."""
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error

    @crosses_ranks
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which save this rank is about to read."""
        return replace(plan, storage_data=self._read().save_id)

    @crosses_ranks
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks read the same save; called on the coordinator.

        Raises:
            CommitConflictError: The checkpoint was replaced while the ranks were reading its manifest.
        """
        saves = {plan.storage_data for plan in plans}
        if len(saves) > 1:
            raise CommitConflictError(
                "The checkpoint was replaced while it was being loaded; load again.",
                url=self._store.url,
                saves=", ".join(sorted(map(str, saves))),
            )
        return plans

    @crosses_ranks
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank's plan asks for; the planner is called from this thread alone.

        Of templates that share memory, as tied weights do, the last in the plan wins.

        Raises:
            CorruptCheckpointError: Bytes are not those that were written.
            CheckpointNotFoundError: The checkpoint was removed or replaced meanwhile.
            UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
            InvalidArgumentError: A template cannot take what is read: a sparse one for a dense tensor, or an expanded
                one; nothing was read then, unless the planner is one that makes templates when they are asked for.
        """
        began_seconds = time.monotonic()
        manifest = self._read()
        # Looked at before a byte is read. What other planners give is looked at when they are asked for it: they may
        # make it then, and keep it in memory until it is complete.
        template_of = planner.lookup_tensor if _gives_the_state_itself(planner) else None
        later = _later_layers(plan, template_of) if template_of is not None else {}
        targets: list[list[Target]] = [[] for _ in range(1 + max(later.values(), default=0))]
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                targets[0] += self._object(manifest, planner, item)
            else:
                targets[later.get(item.dest_index, 0)].append(self._tensor(manifest, planner, item, template_of))
        self._read_all(manifest, targets)
        logger.info(
            "loaded %d items of %s in %.1f s", len(plan.items), self._store.url, time.monotonic() - began_seconds
        )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL or path that a reader can be made for."""
        return is_location(checkpoint_id)

    def _read_all(self, manifest: Manifest, layers: Sequence[Sequence[Target]]) -> None:
        """One layer after another, of which there is at least one."""
        for layer in layers:
            read_or_explain(
                self._store,
                manifest,
                layer,
                memory_budget_bytes=self._memory_budget_bytes,
                retry_seconds=self._timeout_seconds,
                deadline=self._deadline,
            )

    def _find(self) -> Manifest:
        return read_manifest(self._store, step=self._step, retry_seconds=self._timeout_seconds)

    def _read(self) -> Manifest:
        if self._here.manifest is None:
            raise InvalidArgumentError(
                "This reader has no load under way in this thread; it is used through torch's dcp.load."
            )
        return self._here.manifest

    def _object(self, manifest: Manifest, planner: LoadPlanner, item: ReadItem) -> list[Target]:
        name = item.storage_index.fqn
        own = type(planner).load_bytes is DefaultLoadPlanner.load_bytes

        def deliver(value: object) -> None:
            if own:
                with _handed_over(value) as stream:
                    planner.load_bytes(item, stream)
            else:
                planner.load_bytes(item, _fresh_stream(name, value))

        return object_targets(manifest, name, deliver, allow_pickle=self._allow_pickle)

    def _tensor(
        self,
        manifest: Manifest,
        planner: LoadPlanner,
        item: ReadItem,
        template_of: Callable[[MetadataIndex], torch.Tensor] | None,
    ) -> Target:
        tensor, chunk = _chunk_of(manifest, item.storage_index)
        if template_of is not None:
            layout = stored_layout(manifest.tensors.kind_of(tensor))
            require_writable(item.dest_index.fqn, template_of(item.dest_index), layout=layout)
        return tensor_target(
            manifest,
            tensor=tensor,
            chunk=chunk,
            box=Box(tuple(item.storage_offsets), tuple(item.lengths)),
            resolve=partial(planner.resolve_tensor, item),
            commit=partial(planner.commit_tensor, item),
            allow_pickle=self._allow_pickle,
        )


class _UnreadMetadata(Metadata):
    """Stands for metadata that could not be read: whoever looks into it gets the error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> NoReturn:  # type: ignore[override]  # there is nothing to give
        raise self.error

    @property
    def planner_data(self) -> NoReturn:
        raise self.error

    @property
    def storage_meta(self) -> NoReturn:  # type: ignore[override]  # the same
        raise self.error


def _gives_the_state_itself(planner: LoadPlanner) -> TypeGuard[DefaultLoadPlanner]:
    """Whether what the planner resolves is what lies in the state; others may make a tensor to be copied later."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "lookup_tensor", "transform_tensor")
    )


def _later_layers(plan: LoadPlan, template_of: Callable[[MetadataIndex], torch.Tensor]) -> Mapping[MetadataIndex, int]:
    """Of the templates that share memory with an earlier one, the layer in which each is read; there is hardly one."""
    indices = dict.fromkeys(item.dest_index for item in plan.items if item.type != LoadItemType.BYTE_IO)
    found = layers([template_of(index) for index in indices])
    return {index: layer for index, layer in zip(indices, found, strict=True) if layer}


# Objects on their way through the `load_bytes` of torch's own planner.
_on_their_way: dict[int, object] = {}
_numbers = itertools.count()


class _HandedOver:
    """Stands for an object in a stream that this process unpickles at once, without restriction."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.number,)


def _arrived(number: int) -> object:
    return _on_their_way[number]


@contextmanager
def _handed_over(value: object) -> Iterator[io.BytesIO]:
    """A stream that torch's own planner loads the object itself from: no copy of it is made."""
    number = next(_numbers)
    _on_their_way[number] = value
    try:
        stream = io.BytesIO()
        torch.save(_HandedOver(number), stream)
        stream.seek(0)
        yield stream
    finally:
        del _on_their_way[number]


def _fresh_stream(name: str, value: object) -> io.BytesIO:
    """An object as a planner of a user's own takes it; that may unpickle without restriction, and sees only our stream.

    Protocol 2, torch's own, forgets the fold of a time and the byte order of an array; torch's restricted unpickler,
    which a planner may well use, reads no other.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            "An object cannot be handed to torch's planner: torch.save does not take it. dcp_remote.load reads it.",
            object=name,
            cause=error,
        ) from error
    stream.seek(0)
    return stream


def _chunk_of(manifest: Manifest, index: MetadataIndex) -> tuple[int, int]:
    tensors = manifest.tensors
    tensor = tensors.index.get(index.fqn)
    if tensor is None:
        raise InvalidArgumentError("There is no tensor of this name in the checkpoint.", tensor=index.fqn)
    first, count = int(tensors.chunk_first[tensor]), int(tensors.chunks[tensor])
    wanted = tuple(index.offset) if index.offset is not None else None
    if index.index is not None and 0 <= index.index < count:
        chunk = first + index.index
        if wanted is None or tensors.offsets_of(chunk) == wanted:
            return tensor, chunk
    for chunk in range(first, first + count):
        if wanted is None or tensors.offsets_of(chunk) == wanted:
            return tensor, chunk
    raise InvalidArgumentError("There is no chunk of a tensor at this offset.", tensor=index.fqn, offsets=wanted)
