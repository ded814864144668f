"""One rank's part of a restore from a run: agree on the checkpoint, read, agree that no rank failed."""

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
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.common.units import MiB
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Entry
from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.chunk_list import local_plan
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from dcp_remote.loading.engine import Target, read_targets
from dcp_remote.loading.peer_exchange import PeerExchange, cohorts_of
from dcp_remote.loading.peers import host_towards
from dcp_remote.loading.read_items import make_target_layers
from dcp_remote.loading.read_plan import wanted_blocks
from dcp_remote.manager.reports import LoadReport, LoadSeconds
from dcp_remote.manager.telemetry import Operation
from dcp_remote.run.job import warn_of_going_back
from dcp_remote.run.lookup import (
    decode_entry,
    fetch_entry,
    find_entry,
    find_newest,
    no_run,
    require_no_checkpoint_by_itself,
)
from dcp_remote.run.run import catalog_of
from dcp_remote.serialization.state_dict import (
    PER_RANK_KEY,
    PerRank,
    TextKeys,
    apply_loaded,
    empty_places,
    make_template,
)
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

logger = logging.getLogger(__name__)

# Bytes of the manifest, times the ranks, up to which the coordinator sends it to all ranks, over the one host of their
# group's store. A larger manifest is read by each rank from the object store, which has many hosts.
_MANIFESTS_BYTES_MAX = 256 * MiB


def load_rank(
    ranks: RankGroup,
    collective: Collective,
    store: CountingStore,
    state: MutableMapping[str, Any],
    *,
    step: int | str | None,
    planner: LoadPlanner | None,
    operation: Operation,
    allow_pickle: bool,
    memory_budget_bytes: int,
    must_exist: bool = False,
) -> LoadReport | None:
    """Restore a checkpoint; called by every rank, in the block of the operation.

    Args:
        ranks: Ranks that restore together.
        collective: Collective operation of these ranks.
        store: Store, opened at the run.
        state: State; tensors are read into its tensors.
        step: Step or name of the checkpoint; None is the newest.
        planner: Planner of torch; None is `DefaultLoadPlanner()`.
        operation: Operation of telemetry.
        allow_pickle: True to load objects that only code can load.
        memory_budget_bytes: Bound of the buffers beyond the state, in bytes.
        must_exist: True to raise if the run has no checkpoint; the coordinator's counts.

    Returns:
        Report; None if `step` is None and the run has no checkpoint.

    Raises:
        DcpRemoteError: See `CheckpointManager.restore`.
    """
    began_seconds, before = time.monotonic(), store.counts
    with operation.phase("planning"):
        collective.set_activity("asking which checkpoint to restore")
        choose = partial(_choose, store, deadline=collective.deadline, must_exist=must_exist)
        chosen = collective.gather(step, lambda steps: collective.run_in_thread(partial(choose, steps)))
        if chosen is None:
            return None
        entry = chosen.entry
        collective.set_activity(f"planning the restore of step {entry.step}")
        data = chosen.manifest
        if data is None:
            data = collective.run_in_thread(
                partial(fetch_entry, store, entry, retry_seconds=_retry_seconds(collective.deadline))
            )
        # Reads the manifest once more if it is damaged.
        decode = partial(decode_entry, store, entry, data, retry_seconds=_retry_seconds(collective.deadline))
        manifest = collective.run_in_thread(decode)
        del chosen, data
        # `Stateful` objects may call collectives of torch next, in which one rank alone would hang.
        collective.gather(None, _require_no_failure)
        saved = _saved_paths(manifest)
        template = make_template(state, ranks.rank, saved)
        keys = TextKeys(template)
        _require_not_thinned(entry, template)
        if ranks.is_coordinator:
            _warn_of_other_world_size(state, manifest, saved, ranks.world_size)
            _warn_of_empty_places(template, saved)
        planner = planner if planner is not None else DefaultLoadPlanner()
        exchange: PeerExchange | None = None
        if ranks.world_size > 1:
            exchange = PeerExchange(
                ranks.rank,
                host_towards(ranks.store_host),
                # A user's `commit_tensor` may change a tensor: peers must not get its bytes.
                gives=inherits_methods(planner, DefaultLoadPlanner, ("commit_tensor",)),
                memory_budget_bytes=memory_budget_bytes,
                is_over=collective.deadline.expired,
            )
        metadata = to_dcp_metadata(manifest)
        metadata.storage_meta = StorageMeta(checkpoint_id=store.url, save_id=manifest.save_id)
        planner.set_up_planner(keys.template, metadata, ranks.is_coordinator)
        plan = local_plan(planner)
        # torch's own returns the plans unchanged. Plans are large, so they are exchanged only for a user's own method.
        if not inherits_methods(planner, DefaultLoadPlanner, ("create_global_plan",)):
            plan = collective.scatter(plan, planner.create_global_plan)
        plan = planner.finish_plan(plan)
    planned_seconds = time.monotonic()
    with operation.phase("reading"):
        collective.set_activity(f"reading step {entry.step}")
        with exchange or nullcontext():
            layers = make_target_layers(manifest, plan, planner, allow_pickle=allow_pickle)
            _read_layers(store, manifest, layers, collective, exchange, memory_budget_bytes=memory_budget_bytes)
            collective.set_activity(f"has read step {entry.step}, waiting for the others")
            # Until then another rank may want what this rank has read.
            collective.gather(None, _require_no_failure)
        keys.apply_loaded()
        apply_loaded(state, template, ranks.rank)
        collective.gather(None, _require_no_failure)
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


def _read_layers(
    store: ObjectStore,
    manifest: Manifest,
    layers: Sequence[Sequence[Target]],
    collective: Collective,
    exchange: PeerExchange | None,
    *,
    memory_budget_bytes: int,
) -> None:
    """Read the layers one after another; the first, which holds nearly everything, together with the other ranks.

    Args:
        store: Store of the run.
        manifest: Manifest of the checkpoint.
        layers: Targets of this rank, as `make_target_layers` returns them.
        collective: Collective operation of all ranks.
        exchange: This rank's part in the exchange; None if there is no other rank.
        memory_budget_bytes: Limit of the buffers beyond the state, in bytes.
    """
    later = layers
    if exchange is not None:
        first, *later = layers
        wanted = wanted_blocks(manifest, [target.want for target in first])
        # All ranks arrive here, so that none has failed before a byte is read.
        cohort = collective.scatter_grouped(exchange.listen(manifest, wanted), cohorts_of)
        shared_store, plan = exchange.begin(store, manifest, wanted, cohort)
        read_targets(
            shared_store,
            manifest,
            first,
            memory_budget_bytes=exchange.budget_bytes,
            retry_seconds=RANGE_RETRY_SECONDS,
            deadline=collective.deadline,
            plan=plan,
            arrived=exchange.arrived,
        )
    for targets in later:
        read_targets(
            store,
            manifest,
            targets,
            memory_budget_bytes=memory_budget_bytes,
            retry_seconds=RANGE_RETRY_SECONDS,
            deadline=collective.deadline,
        )


def _require_no_failure(_answers: Sequence[None]) -> None:
    """Decide nothing: that all ranks arrive shows that none has failed so far."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Checkpoint to restore.

    Attributes:
        entry: Entry of the catalog.
        manifest: Bytes of the manifest, as stored; None if each rank reads it from the store.
    """

    entry: Entry
    manifest: bytes | None


def _retry_seconds(deadline: Deadline) -> float:
    """Return the seconds for which one request is retried."""
    return min(RANGE_RETRY_SECONDS, deadline.remaining_seconds())


def _choose(
    store: ObjectStore, steps: Sequence[int | str | None], *, deadline: Deadline, must_exist: bool
) -> _Chosen | None:
    """Choose the checkpoint that all ranks ask for; called on the coordinator only."""
    if any(step != steps[0] for step in steps):
        raise InvalidArgumentError(
            "Ranks restore different steps; nothing was restored. Call restore with one step on all ranks.",
            steps=str(steps[:16]),
        )
    if type(steps[0]) not in (int, str, type(None)):
        raise InvalidArgumentError("A step must be an integer, or a checkpoint's name.", step=steps[0])
    # Refused before training begins, because the first save would be refused hours later.
    require_no_checkpoint_by_itself(RetryingStore(store, Deadline(_retry_seconds(deadline))))
    catalog = catalog_of(store, retry_seconds=_retry_seconds(deadline))
    retry_seconds = _retry_seconds(deadline)
    if steps[0] is None and find_newest(catalog, store, must_exist=must_exist, retry_seconds=retry_seconds) is None:
        return None
    if catalog is None:
        assert steps[0] is not None, "find_newest returned"
        raise no_run(RetryingStore(store, Deadline(retry_seconds)), steps[0])
    entry = find_entry(catalog, steps[0], url=store.url)
    warn_of_going_back(catalog, entry, url=store.url)
    data = fetch_entry(store, entry, retry_seconds=_retry_seconds(deadline))
    return _Chosen(entry, data if len(data) * len(steps) <= _MANIFESTS_BYTES_MAX else None)


def _require_not_thinned(entry: Entry, template: Mapping[str, Any]) -> None:
    missing = [key for key in entry.thinned if key in template]
    if missing:
        raise InvalidArgumentError(
            "This checkpoint was thinned: retention deleted entries that the state asks for. Leave these keys out of "
            "the state, or restore a newer step.",
            step=entry.step,
            without=", ".join(missing),
        )


def _saved_paths(manifest: Manifest) -> set[tuple[str | int, ...]]:
    """Return the paths of entries, without those of empty dicts."""
    entries = set(manifest.names())
    return {path for name, path in (manifest.flatten or {}).items() if name in entries}


def _warn_of_empty_places(template: Mapping[str, Any], saved: set[tuple[str | int, ...]]) -> None:
    """Warn of empty dicts of the state below which the checkpoint has values, as of an optimizer without a step."""
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


def _warn_of_other_world_size(
    state: Mapping[str, Any], manifest: Manifest, saved: set[tuple[str | int, ...]], world_size: int
) -> None:
    """Warn of `PerRank` values that stay as they are, and of those of the checkpoint that no rank gets."""
    keys = sorted(key for key, value in state.items() if isinstance(value, PerRank))
    kept = [key for key in keys if any((PER_RANK_KEY, str(rank), key) not in saved for rank in range(world_size))]
    left = [
        key
        for key in keys
        if any((PER_RANK_KEY, str(rank), key) in saved for rank in range(world_size, manifest.world_size))
    ]
    for message, named in (
        ("ranks that it has no values of keep their own", kept),
        ("values of others are left out", left),
    ):
        if named:
            logger.warning(
                "The checkpoint was saved by %d ranks and is restored by %d: %s (%s). What was saved can be read by "
                "dcp_remote.load(url, step=%d, keys='per_rank.*').",
                manifest.world_size,
                world_size,
                message,
                ", ".join(named),
                manifest.run.step if manifest.run is not None else 0,
            )
