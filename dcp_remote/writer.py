"""RemoteWriter: torch's distributed checkpoint, saved straight to object storage.

Every rank puts its own shards under fresh random names; the coordinator puts one manifest, on the condition that nobody
else has. No directory, no rename, no gather, and nothing agreed between ranks beforehand, so that cached plans and
processes that come late are as good as any.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_remote import commit
from dcp_remote.commit import Slot
from dcp_remote.crossing import crosses_ranks
from dcp_remote.dcp_metadata import planned_of
from dcp_remote.errors import (
    CheckpointExistsError,
    DcpRemoteError,
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
from dcp_remote.saving import assembled, require_unicode, shard_bytes_max
from dcp_remote.shard import SHARD_BYTES_MAX, ShardNames
from dcp_remote.shard_writer import write_shards
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.transfer import MEMORY_BUDGET_BYTES
from dcp_remote.turns import short_turns
from dcp_remote.uploads import Uploads

logger = logging.getLogger(__name__)

# Below the 30 minutes after which a gloo group gives up by default: a rank that is late must be able to say why while
# the others still wait for it.
SAVE_TIMEOUT_SECONDS = 1500.0


@dataclass(frozen=True, slots=True)
class _Save:
    """One attempt to save, on one rank; `slot` is the coordinator's."""

    store: ObjectStore
    save_id: str
    rank: int
    began_seconds: float
    deadline: Deadline
    slot: Slot | None


class _Here(Here):
    """The save of this thread."""

    def __init__(self, last: Whereabouts) -> None:
        super().__init__(last)
        self.next_save_id: str | None = None
        self.save: _Save | None = None


class RemoteWriter(StorageWriter):
    """Writes a checkpoint by itself: `dcp.save(state, storage_writer=RemoteWriter("s3://bucket/checkpoint"))`.

    Nothing may change the state until `dcp.save` returns: tensors are sent from where they lie, and one that was
    changed meanwhile fails the save. `dcp.async_save` copies first.

    The checkpoint exists once `dcp.save` returns, whole; if it raises, then either the old one is as it was, or (when
    only the last collective failed) the new one is committed: an error means "not confirmed". Killed at any moment, it
    leaves the old checkpoint or the new one, and shards that no manifest names.

    Costs: one GET and one PUT by the coordinator, one PUT per shard of at most 64 MiB; the first time in a process, on
    a server that is none of the clouds' own, three requests more (see `set_up_storage_writer`). CPU tensors that are
    contiguous are sent from where they lie; everything else is copied a shard at a time. Meanwhile Python's switch
    interval is 1 ms for the whole process (`turns.py`).

    A writer can be used for several saves, one after another, or at a time from several threads (`async_save`). It
    pickles its configuration, with credentials that were given by hand, and never a connection.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///…`, a path, `memory://name` (one process only), or an
            `ObjectStore` of your own.
        overwrite: Replace a checkpoint that is committed here. Its shards stay in the bucket, as orphans.
        allow_pickle: Also store objects that only code can load. Whoever loads them must trust the bucket.
        storage_options: Endpoint, region, credentials and so on, by the names that boto3 and fsspec use.
        memory_budget_bytes: Bound of the copies in memory beyond the state, per rank. Objects that are no tensors come
            on top, encoded; their large tensors and arrays are sent from where they lie.
        timeout_seconds: Of a save, on each rank; requests are repeated until then.

    Raises:
        InvalidArgumentError: The URL or an option is wrong; no request is made here.
    """

    # Tests of how tensors are cut go by small tensors and, in a subclass, small shards.
    _shard_bytes_max = SHARD_BYTES_MAX

    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        overwrite: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, object] | None = None,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        timeout_seconds: float = SAVE_TIMEOUT_SECONDS,
    ) -> None:
        """See the class."""
        super().__init__()
        require_budget(memory_budget_bytes)
        require_timeout(timeout_seconds)
        self._overwrite = overwrite
        self._allow_pickle = allow_pickle
        self._memory_budget_bytes = memory_budget_bytes
        self._timeout_seconds = timeout_seconds
        self._here = _Here(Whereabouts(Location.of(url, storage_options)))

    def __repr__(self) -> str:
        """The URL; never an option."""
        return f"RemoteWriter({self._store.url!r})"

    @property
    def _store(self) -> ObjectStore:
        return self._here.location.store

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The URL or path of the checkpoint, as it was given; torch's logger reads it."""
        return self._here.location.checkpoint_id

    @property
    def save_id(self) -> str | None:
        """Of the save under way, or the last one; each rank has its own, and the coordinator's is committed."""
        return self._here.next_save_id or (self._here.save.save_id if self._here.save is not None else None)

    # ---- torch's protocol, in the order in which torch calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on to another checkpoint in this thread, with the same options; None keeps the URL. Makes no request.

        What cannot be opened is told by `storage_meta`, which torch calls where it tells the other ranks, and by each
        save until a later call names what can. Threads that are new begin where the last call of any thread led.
        """
        self._here.save = None
        self._here.move_to(checkpoint_id)

    @crosses_ranks
    def storage_meta(self) -> StorageMeta | None:
        """Begin a save: a fresh `save_id`.

        Raises:
            InvalidArgumentError: `reset` was given what cannot be opened, or a plain path where this writer's URL is
                not one: torch would make it a local folder.
        """
        self._here.raise_refusal()
        self._here.next_save_id = uuid.uuid4().hex
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._here.next_save_id)

    # The parameter named `kwargs` is how torch knows that it may pass `rank=` (state_dict_saver.py of torch 2.13).
    @crosses_ranks
    @short_turns()
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        """Start the clock; the coordinator looks at what is here, in one request.

        The first save of a process to a server that is none of the clouds' own sees whether it keeps to conditions, in
        three requests more (four for an overwrite).

        Raises:
            InvalidArgumentError: `use_collectives=False`, a store of one process in a job of several, or an overwrite
                that the store cannot do atomically.
            CheckpointExistsError: A checkpoint is committed here and `overwrite` is False; nothing was uploaded.
            StorageError: The server ignores the condition of a write, refused, or did not answer; nothing was uploaded.
        """
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                "use_collectives=False is not supported: without a coordinator nobody could commit one manifest for "
                "all ranks. Leave it at True."
            )
        self._here.raise_refusal()
        require_shared(self._here.location)
        deadline = Deadline(self._timeout_seconds)
        slot = self._look(deadline) if is_coordinator else None
        # Never an earlier one again, whoever calls us: a commit that is in doubt is settled by it.
        save_id, self._here.next_save_id = self._here.next_save_id or uuid.uuid4().hex, None
        self._here.save = _Save(
            store=self._store,
            save_id=save_id,
            rank=int(kwargs.get("rank") or 0),
            began_seconds=time.monotonic(),
            deadline=deadline,
            slot=slot,
        )

    @crosses_ranks
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is: shards are named when they are written, so that a cached plan can be written again.

        Raises:
            InvalidArgumentError: A name that JSON cannot say; told now, not when everything is uploaded.
        """
        require_unicode(plan)
        return plan

    @crosses_ranks
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    @crosses_ranks
    @short_turns()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put this rank's shards; returns when they are all there.

        If it raises, this rank's shards are deleted again (best effort): no manifest can name them.

        Raises:
            SaveFailedError: Names the rank, the shard, the attempts and the cause.
            UnsafeObjectError: Names the object's key and type; raised before anything is uploaded (of a tensor whose
                class needs code to load: when it is its turn).
        """
        save = self._current()
        with Uploads[Any](
            save.store, rank=save.rank, deadline=save.deadline, memory_budget_bytes=self._memory_budget_bytes
        ) as uploads:
            report = write_shards(
                plan,
                planner,
                uploads,
                ShardNames(save.rank),
                rank=save.rank,
                url=save.store.url,
                allow_pickle=self._allow_pickle,
                shard_bytes_max=shard_bytes_max(self._memory_budget_bytes, self._shard_bytes_max),
            )
        written = sum(report.shards.sizes.tolist())
        logger.debug(
            "rank %d wrote %d shards, %d bytes, %d retries",
            save.rank,
            len(report.shards.keys),
            written,
            uploads.retries,
        )
        future: Future[list[WriteResult]] = Future()
        # One result for all items: torch only passes them on.
        future.set_result([WriteResult(MetadataIndex(f"rank {save.rank}"), written, report)])
        return future

    @crosses_ranks
    @short_turns()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; called on the coordinator. `metadata` is not changed: torch may have cached it.

        Raises:
            InvalidArgumentError: Ranks wrote to different URLs; nothing is committed.
            SaveFailedError: The reports leave a gap, or a dtype is not the planned one; nothing is committed.
            CommitConflictError: Another save was committed since this one began.
            CommitUnknownError: The store never said.
        """
        save = self._current()
        assert save.slot is not None, "torch calls finish on the coordinator alone, which has looked at the slot"
        manifest, body = assembled(
            planned_of(metadata),
            [result.storage_data for written in results for result in written],
            url=save.store.url,
            save_id=save.save_id,
            replaces=save.slot.lineage,
        )
        try:
            commit.commit(
                RetryingStore(save.store, save.deadline), save.slot, body, save_id=save.save_id, deadline=save.deadline
            )
        except DcpRemoteError as error:
            # If the other ranks have given up, torch's next collective fails, and its error is all that anybody sees.
            logger.error("not confirmed as committed: %s: %s", save.store.url, error)  # noqa: TRY400  # raised as well
            raise
        logger.info(
            "committed %s: %d bytes in %d shards by %d ranks, %.1f s",
            save.store.url,
            manifest.total_bytes,
            len(manifest.shards.keys),
            manifest.world_size,
            time.monotonic() - save.began_seconds,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL or path that a writer can be made for."""
        return is_location(checkpoint_id)

    def _look(self, deadline: Deadline) -> Slot:
        slot = commit.look(RetryingStore(self._store, deadline))
        if slot.committed and not self._overwrite:
            raise CheckpointExistsError(
                "Checkpoint already exists. Choose another URL, or pass overwrite=True to replace it.",
                url=self._store.url,
                save_id=slot.head.save_id if slot.head else None,
                unreadable=slot.unreadable,
            )
        if slot.version is not None and not self._store.capabilities.compare_and_swap:
            raise InvalidArgumentError(
                "This store cannot replace a checkpoint atomically. Save to another URL.",
                url=self._store.url,
                reason=self._store.capabilities.swap_refusal,
            )
        require_conditional_writes(self._store, deadline, swaps=slot.version is not None)
        return slot

    def _current(self) -> _Save:
        if self._here.save is None:
            raise InvalidArgumentError(
                "This writer has no save under way in this thread; it is used through torch's dcp.save."
            )
        return self._here.save
