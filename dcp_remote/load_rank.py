"""One rank's part of restoring a checkpoint of a run: agree which, read, agree that nobody failed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_remote.catalog import Entry
from dcp_remote.checkpoint import decode_entry, fetch_entry, find, require_no_checkpoint_by_itself
from dcp_remote.chunk_list import local_plan
from dcp_remote.downloads import RANGE_RETRY_SECONDS
from dcp_remote.errors import CheckpointNotFoundError, InvalidArgumentError
from dcp_remote.exchange import Exchange, cohorts_of
from dcp_remote.joint import Joint
from dcp_remote.manifest import Manifest
from dcp_remote.peers import host_towards
from dcp_remote.per_rank import PER_RANK_KEY, PerRank, put_back, template_of
from dcp_remote.ranges import MiB
from dcp_remote.ranks import Ranks
from dcp_remote.read_plan import wanted_blocks
from dcp_remote.reader import RemoteReader
from dcp_remote.reading import Target, read_or_explain
from dcp_remote.reports import LoadReport, LoadSeconds
from dcp_remote.run import catalog_of
from dcp_remote.run_save import warn_of_going_back
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.telemetry import Operation
from dcp_remote.text_keys import KeysPutRight, empty_places

logger = logging.getLogger(__name__)


# Of manifests that all ranks get from the coordinator, over the one host of their group's store. What is more than that
# each reads for itself: a store of objects has many hosts.
_MANIFESTS_BYTES_MAX = 256 * MiB


class _EntryReader(RemoteReader):
    """Reads the checkpoint whose manifest it is given, together with the others of its joint.

    Args:
        store: Opened at the run.
        manifest: Of the checkpoint.
        joint: Of all who read.
        exchange: This rank's side of reading together; None for a rank that is alone.
        allow_pickle: As for `RemoteReader`.
        memory_budget_bytes: As for `RemoteReader`.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        joint: Joint,
        exchange: Exchange | None,
        *,
        allow_pickle: bool,
        memory_budget_bytes: int,
    ) -> None:
        super().__init__(store, allow_pickle=allow_pickle, memory_budget_bytes=memory_budget_bytes)
        self._manifest = manifest
        self._joint = joint
        self._deadline = joint.deadline
        self._exchange = exchange

    def _find(self) -> Manifest:
        return self._manifest

    def _read_all(self, manifest: Manifest, layers: Sequence[Sequence[Target]]) -> None:
        if self._exchange is None:
            super()._read_all(manifest, layers)
            return
        # What shares memory with other templates is hardly anything.
        first, *later = layers
        self._read_together(self._exchange, manifest, first)
        super()._read_all(manifest, later)

    def _read_together(self, exchange: Exchange, manifest: Manifest, targets: Sequence[Target]) -> None:
        wanted = wanted_blocks(manifest, [target.want for target in targets])
        # All are here: nobody has failed before a byte is asked for.
        cohort = self._joint.deal(exchange.tell(manifest, wanted), cohorts_of)
        store, plan = exchange.begin(self._store, manifest, wanted, cohort)
        read_or_explain(
            store,
            manifest,
            targets,
            memory_budget_bytes=exchange.budget_bytes,
            retry_seconds=self._timeout_seconds,
            deadline=self._deadline,
            plan=plan,
            arrived=exchange.arrived,
        )


def load_rank(
    ranks: Ranks,
    joint: Joint,
    store: CountingStore,
    state: MutableMapping[str, Any],
    *,
    step: int | str | None,
    planner: LoadPlanner | None,
    operation: Operation,
    allow_pickle: bool,
    memory_budget_bytes: int,
) -> LoadReport | None:
    """Restore; called by every rank, in a block of the joint. None if there is nothing to restore.

    Args:
        ranks: Who restore together.
        joint: Of all of them.
        store: Opened at the run.
        state: Whose tensors are read into.
        step: A step, or a checkpoint's name; None is the newest.
        planner: torch's; None is its default.
        operation: Of telemetry.
        allow_pickle: Also load objects that only code can load.
        memory_budget_bytes: Bound of the buffers beyond the state.

    Raises:
        DcpRemoteError: See `CheckpointManager.restore`.
    """
    began_seconds, before = time.monotonic(), store.counts
    with operation.phase("planning"):
        joint.note("asking which checkpoint to restore")
        chosen = joint.gather(step, lambda steps: joint.apart(partial(_chosen, store, steps, joint.deadline)))
        if chosen is None:
            if ranks.is_coordinator:
                # A URL that is a little wrong looks the same: a job must not begin anew without a word.
                logger.warning("%s: there is no checkpoint here yet; the job starts from nothing", store.url)
            return None
        entry = chosen.entry
        joint.note(f"planning the restore of step {entry.step}")
        data = chosen.manifest
        if data is None:
            data = joint.apart(partial(fetch_entry, store, entry, retry_seconds=_asking_seconds(joint.deadline)))
        # A damaged manifest is read once more here.
        decode = partial(decode_entry, store, entry, data, retry_seconds=_asking_seconds(joint.deadline))
        manifest = joint.apart(decode)
        del chosen, data
        # What follows may be collectives of training, which nobody may enter alone.
        joint.gather(None, _all_are_here)
        saved = _saved_paths(manifest)
        template = template_of(state, ranks.rank, saved)
        keys = KeysPutRight(template)
        _require_not_thinned(entry, template)
        if ranks.is_coordinator:
            _tell_of_missing_ranks(state, manifest, saved, ranks.world_size)
            _tell_of_what_has_no_place(template, saved)
        planner = planner if planner is not None else DefaultLoadPlanner()
        exchange: Exchange | None = None
        if ranks.world_size > 1:
            exchange = Exchange(
                ranks.rank,
                host_towards(ranks.store_host),
                # Another's may change a tensor when it is complete.
                gives=type(planner).commit_tensor is DefaultLoadPlanner.commit_tensor,
                memory_budget_bytes=memory_budget_bytes,
                is_over=joint.deadline.expired,
            )
        reader = _EntryReader(
            store,
            manifest,
            joint,
            exchange,
            allow_pickle=allow_pickle,
            memory_budget_bytes=memory_budget_bytes,
        )
        metadata = reader.read_metadata()
        planner.set_up_planner(template, metadata, ranks.is_coordinator)
        reader.set_up_storage_reader(metadata, ranks.is_coordinator, rank=ranks.rank)
        plan = reader.prepare_local_plan(local_plan(planner))
        # torch's own changes nothing here, and plans are large: only who has something to say to all is asked.
        if type(planner).create_global_plan is not DefaultLoadPlanner.create_global_plan:
            plan = joint.scatter(plan, planner.create_global_plan)
        plan = planner.finish_plan(plan)
    planned_seconds = time.monotonic()
    with operation.phase("reading"):
        joint.note(f"reading step {entry.step}")
        with exchange or nullcontext():
            reader.read_data(plan, planner).wait()
            joint.note(f"has read step {entry.step}, waiting for the others")
            # Until then there is somebody who wants what this rank has read.
            joint.gather(None, _all_are_here)
        keys.put_right()
        put_back(state, template, ranks.rank)
        joint.gather(None, _all_are_here)
    counts = store.counts.since(before)
    report = LoadReport(
        step=entry.step,
        save_id=entry.save_id,
        saved_world_size=manifest.world_size,
        world_size=ranks.world_size,
        read_bytes=counts.got_bytes,
        seconds=LoadSeconds(planning=planned_seconds - began_seconds, reading=time.monotonic() - planned_seconds),
        requests=counts.requests,
        retries=counts.failed,
        received_bytes=exchange.received_bytes if exchange is not None else 0,
        rereads=counts.reread,
    )
    if ranks.is_coordinator:
        logger.info("%s", report)
    return report


def _all_are_here(_answers: Sequence[None]) -> None:
    """Nobody has failed so far."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is restored.

    Attributes:
        entry: Of the catalog.
        manifest: As it is stored; None if each reads it for itself.
    """

    entry: Entry
    manifest: bytes | None


def _asking_seconds(deadline: Deadline) -> float:
    """How long one question is asked."""
    return min(RANGE_RETRY_SECONDS, deadline.remaining_seconds())


def _chosen(store: ObjectStore, steps: Sequence[int | str | None], deadline: Deadline) -> _Chosen | None:
    if any(step != steps[0] for step in steps):
        raise InvalidArgumentError("Ranks ask for different checkpoints at a time.", steps=str(steps[:16]))
    if type(steps[0]) not in (int, str, type(None)):
        raise InvalidArgumentError("A step is an integer, or a checkpoint's name.", step=steps[0])
    # Before anything is trained: the first save would refuse it, hours later.
    require_no_checkpoint_by_itself(RetryingStore(store, Deadline(_asking_seconds(deadline))))
    catalog = catalog_of(store, retry_seconds=_asking_seconds(deadline))
    if steps[0] is None and (catalog is None or catalog.latest() is None):
        return None
    if catalog is None:
        raise CheckpointNotFoundError("There is no run here yet.", url=store.url, step=steps[0])
    entry = find(catalog, steps[0], url=store.url)
    warn_of_going_back(catalog, entry, url=store.url)
    data = fetch_entry(store, entry, retry_seconds=_asking_seconds(deadline))
    return _Chosen(entry, data if len(data) * len(steps) <= _MANIFESTS_BYTES_MAX else None)


def _require_not_thinned(entry: Entry, template: Mapping[str, Any]) -> None:
    gone = [key for key in entry.thinned if key in template]
    if gone:
        raise InvalidArgumentError(
            "This checkpoint was thinned: retention let go what the state asks for. Leave it out of the state, or "
            "restore a newer step.",
            step=entry.step,
            without=", ".join(gone),
        )


def _saved_paths(manifest: Manifest) -> set[tuple[str | int, ...]]:
    """Return the paths of entries, without those of empty dicts."""
    entries = set(manifest.names())
    return {path for name, path in (manifest.flatten or {}).items() if name in entries}


def _tell_of_what_has_no_place(template: Mapping[str, Any], saved: set[tuple[str | int, ...]]) -> None:
    """Of an optimizer that has made no step, most of all: what is empty asks for nothing, and gets nothing."""
    places = empty_places(template)
    depths = {len(place) for place in places}
    below_of = Counter(path[:depth] for path in saved for depth in depths if depth < len(path))
    for place in places:
        if below := below_of[place]:
            logger.warning(
                "%s is empty in the state that is restored, so that %d values of the checkpoint are left out. An "
                "optimizer has no state before its first step: use torch's get_optimizer_state_dict.",
                ".".join(map(str, place)),
                below,
            )


def _tell_of_missing_ranks(
    state: Mapping[str, Any], manifest: Manifest, saved: set[tuple[str | int, ...]], world_size: int
) -> None:
    """Once: which of the values that differ between ranks stay as they are, and which are nobody's."""
    keys = sorted(key for key, value in state.items() if isinstance(value, PerRank))
    kept = [key for key in keys if any((PER_RANK_KEY, str(rank), key) not in saved for rank in range(world_size))]
    left = [
        key
        for key in keys
        if any((PER_RANK_KEY, str(rank), key) in saved for rank in range(world_size, manifest.world_size))
    ]
    for told, of in (("ranks that it has no values of keep their own", kept), ("values of others are left out", left)):
        if of:
            logger.warning(
                "The checkpoint was saved by %d ranks and is restored by %d: %s (%s). What was saved can be read by "
                "dcp_remote.load(url, step=%d, keys='per_rank.*').",
                manifest.world_size,
                world_size,
                told,
                ", ".join(of),
                manifest.run.step if manifest.run is not None else 0,
            )
