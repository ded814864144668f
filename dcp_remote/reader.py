"""RemoteReader and load: a checkpoint read back, at any world size, every byte verified.

A reader does no collective of its own: torch does not tell it the process group, and a collective that somebody does
not join is a hang. Every rank reads the manifest, then just the ranges that it needs.
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_remote import commit
from dcp_remote.checkpoint import read_manifest
from dcp_remote.dcp_metadata import to_dcp_metadata
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
)
from dcp_remote.location import is_location, open_location, reopen_location, require_positive, require_shared
from dcp_remote.manifest import JSON, RAW, Manifest
from dcp_remote.objects import EncodedObject, Encoding, decode_object
from dcp_remote.ranges import Box
from dcp_remote.read_plan import Want
from dcp_remote.reading import BytesTarget, Target, TensorTarget, read_targets
from dcp_remote.serialization import decode_tensor, dtype_of, empty_tensor, narrow
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.transfer import MEMORY_BUDGET_BYTES, RANGE_RETRY_SECONDS

logger = logging.getLogger(__name__)


class RemoteReader(StorageReader):
    """Reads a checkpoint: `dcp.load(state, storage_reader=RemoteReader("s3://bucket/checkpoint"))`.

    Works at any world size and with any sharding of the template. Each rank makes one GET for the manifest, one per
    range of at most 8 MiB that it needs, and one small one per shard of which it needs only parts of pieces. No code
    runs on load. If it raises, the template holds parts of the checkpoint and must not be used.

    A reader can be used for several loads, one after another. It pickles its configuration, never a connection.

    Args:
        url: As for `RemoteWriter`.
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
        allow_pickle: bool = False,
        storage_options: Mapping[str, object] | None = None,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        timeout_seconds: float = RANGE_RETRY_SECONDS,
    ) -> None:
        """See the class."""
        super().__init__()
        require_positive(memory_budget_bytes=memory_budget_bytes, timeout_seconds=timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._storage_options = dict(storage_options) if storage_options else None
        self._store = open_location(url, self._storage_options)
        self._given = isinstance(url, ObjectStore)
        self._allow_pickle = allow_pickle
        self._memory_budget_bytes = memory_budget_bytes
        self._manifest: Manifest | None = None
        self._load_id: str | None = None

    def __repr__(self) -> str:
        """The URL; never an option."""
        return f"RemoteReader({self._store.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Configuration only."""
        return {**self.__dict__, "_manifest": None, "_load_id": None}

    @property
    def checkpoint_id(self) -> str:
        """The URL of the checkpoint; torch's logger reads it."""
        return self._store.url

    @property
    def load_id(self) -> str | None:
        """Of the load under way, or the last one."""
        return self._load_id

    # ---- torch's protocol, in the order in which torch calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on to another checkpoint, with the same options; None keeps the URL. Makes no request.

        Raises:
            InvalidArgumentError: A plain path, where this reader's URL is not one.
        """
        self._manifest = None
        if checkpoint_id is not None:
            self._store = reopen_location(self._store, checkpoint_id, self._storage_options, given=self._given)

    # Not named `kwargs`: torch would take it for leave to try again with `rank=`, and then to drop the collectives on
    # this rank alone, which hangs all of them (state_dict_loader.py of torch 2.13).
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Read and check the manifest; one GET, on every rank.

        A failure is raised by whoever uses what is returned: `set_up_storage_reader`, in a load. What is raised *here*
        torch replaces by an AssertionError, and nobody could tell a missing checkpoint from a store that is down.

        Raises:
            CheckpointNotFoundError: When used: no checkpoint is committed here.
            CorruptCheckpointError: When used: the manifest is damaged.
            UnsupportedFormatError: When used: a newer version wrote it.
        """
        self._load_id = os.urandom(16).hex()
        self._manifest = None
        try:
            require_shared(self._store)
            self._manifest = read_manifest(self._store, retry_seconds=self._timeout_seconds)
            metadata = to_dcp_metadata(self._manifest)
        except DcpRemoteError as error:
            return _UnreadMetadata(error)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self._manifest.save_id, load_id=self._load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        """Nothing to set up: `read_metadata` has read all there is, or raises here what it could not raise there."""
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which save this rank is about to read."""
        return replace(plan, storage_data=self._read().save_id)

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank's plan asks for; the planner is called from this thread alone.

        Raises:
            CorruptCheckpointError: Bytes are not those that were written.
            CheckpointNotFoundError: The checkpoint was removed or replaced meanwhile.
            UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
        """
        began_seconds = time.monotonic()
        manifest = self._read()
        targets: list[Target] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                targets += self._object(manifest, planner, item)
            else:
                targets.append(self._tensor(manifest, planner, item))
        read_or_explain(
            self._store,
            manifest,
            targets,
            memory_budget_bytes=self._memory_budget_bytes,
            retry_seconds=self._timeout_seconds,
        )
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

    def _read(self) -> Manifest:
        if self._manifest is None:
            raise InvalidArgumentError("This reader has no load under way; it is used through torch's dcp.load.")
        return self._manifest

    def _object(self, manifest: Manifest, planner: LoadPlanner, item: ReadItem) -> list[Target]:
        def deliver(value: object) -> None:
            # torch's planner unpickles without restriction: it may only ever see a stream that we wrote just now.
            stream = io.BytesIO()
            torch.save(value, stream)
            stream.seek(0)
            planner.load_bytes(item, stream)

        return object_targets(manifest, item.storage_index.fqn, deliver, allow_pickle=self._allow_pickle)

    def _tensor(self, manifest: Manifest, planner: LoadPlanner, item: ReadItem) -> Target:
        tensor, chunk = _chunk_of(manifest, item.storage_index)
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

    def __init__(self, error: DcpRemoteError) -> None:
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


def load(
    url: str | os.PathLike[str] | ObjectStore,
    *,
    keys: str | Sequence[str] | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    timeout_seconds: float = RANGE_RETRY_SECONDS,
) -> dict[str, Any]:
    """Read a checkpoint, or part of it, without a template: whole tensors on the CPU, in the nesting that was saved.

    For one process: a notebook, an export, an inspection. One GET for the manifest, and one per range of 8 MiB.

    Args:
        url: As for `RemoteWriter`.
        keys: Names, or patterns of them such as `"model.*"`, as `dcp-remote show` lists them; None reads everything.
        allow_pickle: Also load objects that only code can load.
        storage_options: As for `RemoteWriter`.
        memory_budget_bytes: Bound of the buffers beyond what is returned.
        timeout_seconds: How long one request is tried again while the store fails.

    Raises:
        InvalidArgumentError: A name or pattern that fits nothing; says what is near.
        CheckpointNotFoundError: No checkpoint is committed here.
        CorruptCheckpointError: Bytes are not those that were written.
    """
    store = open_location(url, storage_options)
    manifest = read_manifest(store, retry_seconds=timeout_seconds)
    names = _chosen(list(manifest.names()), [keys] if isinstance(keys, str) else keys, store.url)
    flat: dict[str, Any] = dict.fromkeys(names)
    targets: list[Target] = []
    for name in names:
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
        set_element(nested, manifest.flatten.get(name, (name,)), value)
    return nested


def read_or_explain(
    store: ObjectStore,
    manifest: Manifest,
    targets: Sequence[Target],
    *,
    memory_budget_bytes: int,
    retry_seconds: float,
) -> None:
    """Read all targets; if a shard is gone, look whether the checkpoint still is what it was.

    Raises:
        CheckpointNotFoundError: It was removed or replaced while it was being read.
        CorruptCheckpointError: It is still there, without one of its shards, or with other bytes.
    """
    try:
        read_targets(store, manifest, targets, memory_budget_bytes=memory_budget_bytes, retry_seconds=retry_seconds)
    except ObjectNotFoundError as error:
        head = commit.look(RetryingStore(store, Deadline(retry_seconds))).head
        if head is None or head.save_id != manifest.save_id:
            raise CheckpointNotFoundError(
                "The checkpoint was removed or replaced while it was being read; load again.",
                url=store.url,
                save_id=manifest.save_id,
            ) from error
        raise CorruptCheckpointError(
            "A shard of the checkpoint is missing. Use another checkpoint.", url=store.url, cause=error
        ) from error


def object_targets(
    manifest: Manifest, name: str, deliver: Callable[[object], None], *, allow_pickle: bool
) -> list[Target]:
    """What reads an object; nothing, if it stands in the manifest: then it is delivered at once."""
    if name in manifest.inline:
        deliver(decode_object(name, EncodedObject(JSON, manifest.inline[name]), allow_pickle=allow_pickle))
        return []
    stored = manifest.stored_index.get(name)
    if stored is None:
        raise InvalidArgumentError("There is no object of this name in the checkpoint.", object=name)
    encoding = cast("Encoding", stored.encoding)  # `manifest_check` knows only these

    def done(data: bytes) -> None:
        deliver(decode_object(name, EncodedObject(encoding, data), allow_pickle=allow_pickle))

    want = Want(stored.piece_first, stored.piece_first + stored.pieces, None)
    return [BytesTarget(want, length=_want_bytes(manifest, want), done=done)]


def tensor_target(
    manifest: Manifest,
    *,
    tensor: int,
    chunk: int,
    box: Box,
    resolve: Callable[[], torch.Tensor],
    commit: Callable[[torch.Tensor], None],
    allow_pickle: bool,
) -> Target:
    """What reads a box of a chunk; a tensor that is stored as a stream is read whole, then cut."""
    kind = manifest.tensors.kind_of(tensor)
    if kind.encoding == RAW:
        return TensorTarget(manifest, tensor=tensor, chunk=chunk, box=box, resolve=resolve, commit=commit)
    name, sizes = manifest.tensors.names[tensor], manifest.tensors.sizes_of(chunk)

    def done(data: bytes) -> None:
        source = decode_tensor(name, kind.encoding, data, sizes=sizes, allow_pickle=allow_pickle)
        destination = resolve()
        with torch.no_grad():
            destination.copy_(narrow(source, box))
        commit(destination)

    want = Want(int(manifest.tensors.piece_first[chunk]), int(manifest.tensors.piece_first[chunk + 1]), None)
    return BytesTarget(want, length=_want_bytes(manifest, want), done=done)


def _want_bytes(manifest: Manifest, want: Want) -> int:
    return int(manifest.pieces.length[want.piece_first : want.piece_stop].sum())


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


def _whole_tensor(manifest: Manifest, number: int, flat: dict[str, Any], *, allow_pickle: bool) -> list[Target]:
    tensors = manifest.tensors
    name, kind = tensors.names[number], tensors.kind_of(number)
    first = int(tensors.chunk_first[number])
    if kind.encoding != RAW:
        want = Want(int(tensors.piece_first[first]), int(tensors.piece_first[first + 1]), None)

        def done(data: bytes) -> None:
            flat[name] = decode_tensor(
                name, kind.encoding, data, sizes=tensors.shape_of(number), allow_pickle=allow_pickle
            )

        return [BytesTarget(want, length=_want_bytes(manifest, want), done=done)]
    whole = empty_tensor(dtype_of(kind.dtype), tensors.shape_of(number))
    flat[name] = whole
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


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing(_tensor: torch.Tensor) -> None:
    """A destination of our own needs no commit."""


def _chosen(names: Sequence[str], patterns: Sequence[str] | None, url: str) -> list[str]:
    if patterns is None:
        return list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3) or sorted({name.partition(".")[0] for name in names})
            raise InvalidArgumentError(
                "No entry of the checkpoint has this name, or fits this pattern.",
                key=pattern,
                near=", ".join(near[:10]),
                url=url,
            )
        chosen |= found
    return [name for name in names if name in chosen]
