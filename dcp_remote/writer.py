"""RemoteWriter: torch's distributed checkpoint, saved straight to object storage.

Every rank puts its own shards under fresh random names. The coordinator commits by one conditional put of the manifest.
There is no directory, no rename and no gather of tensors, and ranks agree on nothing beforehand, so cached plans and
processes that join late work.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.gil import short_switch_interval
from dcp_remote.common.hedging import is_far
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.common.picklable_errors import replace_unpicklable_errors
from dcp_remote.common.threads import begin_early
from dcp_remote.common.units import MEMORY_BUDGET_BYTES
from dcp_remote.coordination.group import default_world_size
from dcp_remote.errors import CheckpointExistsError, DcpRemoteError, InvalidArgumentError
from dcp_remote.format.shard import ShardNames
from dcp_remote.run import commit
from dcp_remote.run.commit import Slot
from dcp_remote.run.conditional_put import require_compare_and_swap
from dcp_remote.saving.dcp_metadata import to_columns
from dcp_remote.saving.manifest_assembly import assemble_manifest, require_unicode
from dcp_remote.saving.packing import require_shard_bytes
from dcp_remote.saving.plan_cache import describe_tensors
from dcp_remote.saving.plan_table import pack, require_held, unpack
from dcp_remote.saving.rank_differences import Described, require_equal_tensors
from dcp_remote.saving.rank_report import WrittenShard
from dcp_remote.saving.shard_writer import require_no_imitations, write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.location import (
    Located,
    Location,
    ThreadLocation,
    join_job,
    require_budget,
    require_timeout,
)
from dcp_remote.storage.outages import name_speaker
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# Below the default timeout of a gloo group, 30 minutes: a late rank must be able to report its error while the other
# ranks still wait for it.
SAVE_TIMEOUT_SECONDS = 1500.0

# Methods by which a planner may leave entries out. An older torch may not have all of them.
_PLANNING_METHODS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "_dedup_save_plans",
    "_create_global_plan",
)


def _delete_beside(threads: ThreadPoolExecutor, delete: Callable[[], None]) -> None:
    """Delete what a probe has left beside the save; at once if no thread can be started."""
    try:
        threads.submit(delete)
    except RuntimeError:
        delete()
    threads.shutdown(wait=False)  # the thread ends after this, also if the save fails


@dataclass(frozen=True, slots=True)
class _Save:
    """State of one save on one rank."""

    store: ObjectStore
    save_id: str
    rank: int
    deadline: Deadline
    slot: Slot | None  # None except on the coordinator
    probes: ThreadPoolExecutor  # deletes what probes have left; the process does not exit before the end of that
    has_all_entries: bool = False  # True if the planner plans as torch's does; a user's may leave entries out


@dataclass(frozen=True, slots=True)
class _Described:
    """Description of the tensors of a rank's plan, and the names of its objects.

    Sent beside the plan, because torch's planner drops items of several ranks but one before the writer sees the plans.
    """

    packed: bytes


class _ThreadState(ThreadLocation):
    """Location and current save of one thread."""

    next_save_id: str | None = None
    save: _Save | None = None


class RemoteWriter(Located, StorageWriter):
    """Writer of single checkpoints: `dcp.save(state, storage_writer=RemoteWriter("s3://bucket/checkpoint"))`.

    The state must not change until `dcp.save` returns: tensors are sent from their own memory, and a tensor that
    changes meanwhile fails the save. `dcp.async_save` copies the state first.

    When `dcp.save` returns, the whole checkpoint is committed. An error means "not confirmed": the previous checkpoint
    is unchanged, or, if only the last collective operation failed, the new one is committed. A crash at any moment
    leaves the old checkpoint or the new one, and orphaned shards.

    Costs: one GET and one PUT by the coordinator, and of more than 200,000 pieces a PUT for each 50,000; one PUT per
    shard of at most 64 MiB; for the first save of a process to a server that is not a cloud's own, three requests more
    (see `set_up_storage_writer`). Contiguous CPU tensors are sent without a copy; everything else is copied a shard at
    a time. During a save, the GIL switch interval of the
    whole process is 1 ms (`common/gil.py`).

    A writer can be used for several saves, one after another, or concurrently from several threads (`async_save`).
    Pickling keeps its configuration, including credentials passed in `storage_options`, and never a connection.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///…`, a path, `memory://name` (one process only), or an
            `ObjectStore` of your own.
        overwrite: Replace a checkpoint that is committed here. Its shards stay in the bucket, as orphans.
        allow_pickle: Also store objects that only code can load. Readers must then trust the bucket.
        storage_options: Endpoint, region, credentials and so on, by the names that boto3 and fsspec use.
        memory_budget_bytes: Bound of the copies in memory beyond the state, per rank, in bytes. Encoded objects (not
            tensors) come on top; the large tensors and arrays in them are sent without a copy. 256 MiB.
        timeout_seconds: Deadline of a save on each rank, in seconds; failed requests are repeated until then. 1500.
        shard_bytes: Size of the shards in bytes, from 1 MiB to 64 MiB; None for 8 MiB to 64 MiB, by the bytes of the
            rank, so that shards that are sent at once end together.

    Raises:
        InvalidArgumentError: The URL or an option is wrong; no request is made here.
    """

    _thread: _ThreadState

    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        overwrite: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, object] | None = None,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        timeout_seconds: float = SAVE_TIMEOUT_SECONDS,
        shard_bytes: int | None = None,
    ) -> None:
        """Check the arguments and open the store; no request is made."""
        super().__init__()
        require_budget(memory_budget_bytes)
        require_timeout(timeout_seconds)
        require_shard_bytes(shard_bytes, memory_budget_bytes)
        self._overwrite = overwrite
        self._allow_pickle = allow_pickle
        self._memory_budget_bytes = memory_budget_bytes
        self._timeout_seconds = timeout_seconds
        self._shard_bytes = shard_bytes
        self._thread = _ThreadState([(Location.of(url, storage_options), None)])
        # True in the process of an asynchronous save, where pickled entries cannot be told from imitations.
        self._was_unpickled = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Note that this writer was unpickled."""
        self.__dict__.update(state, _was_unpickled=True)

    @property
    def save_id(self) -> str | None:
        """ID of the save in progress, or of the last one. Each rank has its own; the coordinator's is committed."""
        return self._thread.next_save_id or (self._thread.save.save_id if self._thread.save is not None else None)

    # ---- torch's protocol, in the order in which torch calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch this thread to another checkpoint, with the same options; None keeps the URL. Makes no request.

        A URL that cannot be opened is refused by `storage_meta`, whose errors torch sends to the other ranks, and by
        each save until a later `reset` names a valid one. A new thread starts at the URL of the last `reset` in any
        thread.
        """
        self._thread.save = None
        self._thread.move_to(checkpoint_id)

    @replace_unpicklable_errors
    def storage_meta(self) -> StorageMeta | None:
        """Begin a save: draw a fresh `save_id`.

        Raises:
            InvalidArgumentError: `reset` was given a URL that cannot be opened, or a plain path while this writer is
                for a URL: torch would make the path a local folder.
        """
        self._thread.raise_refusal()
        self._thread.next_save_id = uuid.uuid4().hex
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._thread.next_save_id)

    # The parameter named `kwargs` is how torch knows that it may pass `rank=` (state_dict_saver.py of torch 2.13).
    @replace_unpicklable_errors
    @short_switch_interval()
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        """Start the deadline; on the coordinator, read the manifest that is here, in one request.

        The first save of a process to a server that is not a cloud's own also checks, with three requests more (four
        for an overwrite), that the server honours conditional writes. The manifest is read meanwhile; the third request
        deletes what the others put, and ends before the save does.

        Raises:
            InvalidArgumentError: `use_collectives=False`, a store of one process in a job of several, or an overwrite
                that the store cannot do atomically.
            CheckpointExistsError: A checkpoint is committed here and `overwrite` is False; nothing was uploaded.
            StorageError: The server ignores the condition of a write, refused, or did not answer; nothing was uploaded.
        """
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                "use_collectives=False is not supported: a coordinator must commit one manifest for all ranks. Leave "
                "it at True."
            )
        self._thread.raise_refusal()
        join_job(self._thread.location, default_world_size())
        name_speaker(self._store.url, is_speaker=is_coordinator)
        deadline = Deadline(self._timeout_seconds)
        probes = ThreadPoolExecutor(thread_name_prefix="dcp_remote-probe")
        slot = self._take_slot(deadline, partial(_delete_beside, probes)) if is_coordinator else None
        # A commit in doubt is settled by its save_id, so no two saves may have the same.
        save_id, self._thread.next_save_id = self._thread.next_save_id or uuid.uuid4().hex, None
        self._thread.save = _Save(
            store=self._store,
            save_id=save_id,
            rank=int(kwargs.get("rank") or 0),
            deadline=deadline,
            slot=slot,
            probes=probes,
        )

    @replace_unpicklable_errors
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with a description of its entries, by which the coordinator compares the ranks.

        Raises:
            InvalidArgumentError: A name is not Unicode, so the manifest cannot hold it; raised before any upload.
        """
        require_unicode(plan)
        # A plan without items may be torch's sign that this rank plans what it planned in the last save.
        if not plan.items or plan.storage_data is not None:
            return plan
        objects = tuple(item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO)
        return replace(plan, storage_data=_Described(pack((describe_tensors(plan), objects))))

    @replace_unpicklable_errors
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Compare the ranks' descriptions of their tensors; coordinator only.

        The plans are returned with the latency of the store, in seconds, in place of the descriptions.

        Of an object that several ranks hold, the lowest rank's is saved. With torch's cache of plans
        (`enable_plan_caching`), only ranks whose plans have changed are compared, and torch chooses the object's rank.

        Raises:
            InvalidArgumentError: Ranks give a tensor different shapes or dtypes. Names all such tensors; nothing was
                uploaded.
        """
        described = [plan.storage_data if isinstance(plan.storage_data, _Described) else None for plan in plans]
        # Nearly always all ranks send the same bytes, which are unpacked once.
        unpacked: dict[_Described, tuple[Described, tuple[str, ...]]] = {
            packed: unpack(packed.packed) for packed in dict.fromkeys(described) if packed is not None
        }
        require_equal_tensors(
            [unpacked[packed][0] if packed is not None else None for packed in described],
            lambda: (item.index.fqn for plan in plans for item in plan.items),
        )
        if not _are_cached_by_torch(plans):  # plans of later saves would lack what was moved, or have it twice
            plans = _move_objects(plans, [unpacked[packed][1] if packed is not None else () for packed in described])
        latency_seconds: float = getattr(self._store, "latency_seconds", 0.0)  # not in the contract of a store
        return [
            replace(plan, storage_data=latency_seconds) if packed is not None else plan
            for plan, packed in zip(plans, described, strict=True)
        ]

    @replace_unpicklable_errors
    @short_switch_interval()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put this rank's shards; return when all are stored.

        If this raises, this rank's shards are deleted again (best effort): no manifest can name them.

        Raises:
            SaveFailedError: Names the rank, the shard, the attempts and the cause.
            InvalidArgumentError: A tuple looks like an entry of `Opaque` or `Files`; nothing was uploaded by this rank.
            UnsafeObjectError: Names the object's key and type. Raised before anything is uploaded; for a tensor whose
                class needs code to load, when that tensor is read.
        """
        save = self._current()
        has_all_entries = inherits_methods(planner, DefaultSavePlanner, _PLANNING_METHODS)
        self._thread.save = replace(save, has_all_entries=has_all_entries)
        if not self._was_unpickled:
            require_no_imitations(plan, planner)
        with Uploads[WrittenShard](
            save.store,
            rank=save.rank,
            deadline=save.deadline,
            memory_budget_bytes=self._memory_budget_bytes,
            latency_seconds=plan.storage_data if isinstance(plan.storage_data, float) else 0.0,
        ) as uploads:
            report = write_shards(
                plan,
                planner,
                uploads,
                allow_pickle=self._allow_pickle,
                shard_bytes=self._shard_bytes,
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
        # One result for all items is enough: torch only passes the results on to `finish`.
        future.set_result([WriteResult(MetadataIndex(f"rank {save.rank}"), written, report.to_sent())])
        return future

    @replace_unpicklable_errors
    @short_switch_interval()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; coordinator only. `metadata` is not changed: torch may have cached it.

        Raises:
            InvalidArgumentError: Ranks wrote to different URLs, or no rank holds any part of a tensor; nothing is
                committed.
            SaveFailedError: A chunk is missing from the reports, or a dtype is not the planned one; nothing is
                committed.
            CommitConflictError: Another save was committed since this one began.
            CommitUnknownError: The store did not confirm the commit by the deadline.
        """
        save = self._current()
        assert save.slot is not None, "torch calls finish on the coordinator only, which has read the slot"
        planned = to_columns(metadata)
        if save.has_all_entries:
            require_held(planned.flatten, planned.names)
        is_over = threading.Event()  # a save that has failed repeats no PUT of a segment
        storing = RetryingStore(save.store, save.deadline.until(is_over))
        try:
            manifest, body = assemble_manifest(
                planned,
                [result.storage_data for written in results for result in written],
                url=save.store.url,
                save_id=save.save_id,
                replaces=commit.list_replaced(save.slot),
                segment_names=ShardNames(0),
                put=storing.put,
            )
            commit.commit(storing, save.slot, body, save_id=save.save_id, deadline=save.deadline)
        except DcpRemoteError as error:
            # If the other ranks have given up, torch's next collective operation fails and its error hides this one.
            logger.error("not confirmed as committed: %s: %s", save.store.url, error)  # noqa: TRY400  # raised as well
            raise
        finally:
            is_over.set()
        save.probes.shutdown()
        logger.info(
            "committed %s: %d bytes in %d shards by %d ranks, %.1f s",
            save.store.url,
            manifest.total_bytes,
            len(manifest.shards.keys),
            manifest.world_size,
            save.deadline.elapsed_seconds(),
        )

    def _take_slot(self, deadline: Deadline, clean_up: Callable[[Callable[[], None]], None]) -> Slot:
        """Return the slot, which is free or may be overwritten, in a store that has proven conditional writes."""
        store = self._store
        with begin_early(
            lambda clock: self._read_slot(RetryingStore(store, Deadline(deadline.remaining_seconds(), clock))),
            # An overwrite needs swaps only if something is there, and there is mostly.
            at_once=is_far(store.url) and not self._overwrite,
        ) as read_slot:
            if not self._overwrite:
                try:
                    require_conditional_writes(store, deadline, swaps=False, clean_up=clean_up)
                except Exception:
                    read_slot()  # its error says more than the probe's: a checkpoint is here, or no store
                    raise
            slot = read_slot()
        if slot.version is not None:
            require_compare_and_swap(store, "This store cannot replace a checkpoint atomically. Save to another URL.")
        if self._overwrite or slot.version is not None:
            require_conditional_writes(store, deadline, swaps=slot.version is not None, clean_up=clean_up)
        return slot

    def _read_slot(self, store: ObjectStore) -> Slot:
        slot = commit.read_slot(store)
        if commit.is_committed(slot) and not self._overwrite:
            raise CheckpointExistsError(
                "Checkpoint already exists. Choose another URL, or pass overwrite=True to replace it.",
                url=store.url,
                save_id=slot.content.save_id if slot.content else None,
                unreadable=slot.error,
            )
        return slot

    def _current(self) -> _Save:
        if self._thread.save is None:
            raise InvalidArgumentError(
                "This writer has no save in progress in this thread. Use it through torch's dcp.save."
            )
        return self._thread.save


def _move_objects(plans: Sequence[SavePlan], held: Sequence[Collection[str]]) -> list[SavePlan]:
    """Return final plans in which each object is written by the lowest of the ranks that planned to.

    `held` has the names of the objects that each rank planned to write.
    """
    lowest: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name in names:
            lowest.setdefault(name, rank)
    items, moved = [list[WriteItem]() for _ in plans], set[int]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            writer = lowest.get(item.index.fqn, rank) if item.type == WriteItemType.BYTE_IO else rank
            items[writer].append(item)
            moved |= {rank, writer} if writer != rank else set()
    return [replace(plan, items=items[rank]) if rank in moved else plan for rank, plan in enumerate(plans)]


def _are_cached_by_torch(plans: Sequence[SavePlan]) -> bool:
    """Return whether torch's planner keeps final plans for later saves (`enable_plan_caching`)."""
    cached = {id(plan) for of_all in getattr(SavePlanner, "_cached_global_plan", {}).values() for plan in of_all}
    return any(id(plan) in cached or not getattr(plan, "usable", True) for plan in plans)
