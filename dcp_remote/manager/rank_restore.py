"""One rank's part of a restore from a run: agree on the checkpoint, read, agree that no rank failed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.common.text import format_count
from dcp_remote.common.units import MiB
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.format.catalog import Entry
from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.chunk_list import local_plan
from dcp_remote.loading.dcp_metadata import SourceMeta, to_dcp_metadata
from dcp_remote.loading.engine import Target, read_targets
from dcp_remote.loading.overlapping_templates import find_lost_values
from dcp_remote.loading.peer_sockets import RankSockets, host_towards
from dcp_remote.loading.peers import Address, PeerExchange, cohorts_of
from dcp_remote.loading.planner import RemoteLoadPlanner
from dcp_remote.loading.read_items import make_target_layers
from dcp_remote.loading.read_plan import ReadPlan, plan_reads, wanted_blocks
from dcp_remote.loading.selection import rename_path
from dcp_remote.loading.state_check import StateCheck
from dcp_remote.loading.state_verdict import Verdict
from dcp_remote.manager.progress import Progress
from dcp_remote.manager.reports import NAMES_LISTED_MAX, LoadReport, LoadSeconds
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
from dcp_remote.serialization.module_state import MadeStates, keep_nothing
from dcp_remote.serialization.name_links import find_links
from dcp_remote.serialization.state_dict import (
    PER_RANK_KEY,
    PerRank,
    TextKeys,
    apply_loaded,
    empty_places,
    fit_groups,
    has_nested_shards,
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
    planner: LoadPlanner,
    operation: Operation,
    allow_pickle: bool,
    memory_budget_bytes: int,
    progress: Progress,
    sockets: RankSockets | None,
    must_exist: bool = False,
    go_on: bool = True,
) -> LoadReport | None:
    """Restore a checkpoint; called by every rank, in the block of the operation.

    Args:
        ranks: Ranks that restore together.
        collective: Collective operation of these ranks.
        store: Store, opened at the run.
        state: State; tensors are read into its tensors.
        step: Step or name of the checkpoint; None is the newest.
        planner: Planner of torch, or a `RemoteLoadPlanner`.
        operation: Operation of telemetry.
        allow_pickle: True to load objects that only code can load.
        memory_budget_bytes: Bound of the buffers beyond the state, in bytes.
        progress: Progress of the restore.
        sockets: Network of the sockets between ranks; None for no sockets.
        must_exist: True to raise if the run has no checkpoint.
        go_on: True if the next save goes on from this checkpoint; a warning names those that it will abandon.

    Returns:
        Report; None if `step` is None and the run has no checkpoint.

    Raises:
        DcpRemoteError: See `CheckpointManager.restore`.
    """
    began_seconds, before = time.monotonic(), store.counts
    # After a mismatch the optimizers have no states that they did not have before.
    with operation.phase("planning"), MadeStates() as made:
        collective.set_activity("asking which checkpoint to restore")
        choose = partial(_choose, store, deadline=collective.deadline, must_exist=must_exist, go_on=go_on)
        chosen = collective.gather(
            _Request.of(step, planner, must_exist=must_exist),
            lambda requests: collective.run_in_thread(partial(choose, requests)),
        )
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
        renamed = _rename_entries(manifest, planner, state)
        saved = _saved_paths(manifest, renamed)
        keep = (
            partial(planner.keep_names, saved=set(renamed.values()))
            if isinstance(planner, RemoteLoadPlanner)
            else keep_nothing
        )
        template = make_template(state, ranks.rank, saved, keep=keep, made=made)
        keys = TextKeys(template)
        if not isinstance(planner, RemoteLoadPlanner):
            _require_not_thinned(entry, template)
            if ranks.is_coordinator:
                _warn_of_empty_places(template, saved)
        if ranks.is_coordinator:
            _warn_of_other_world_size(state, manifest, saved, ranks.world_size)
        if isinstance(planner, RemoteLoadPlanner):
            # torch's flattening drops a ShardedTensor of which this rank has nothing, and then takes the checkpoint for
            # one of an older torch.
            planner.flatten_sharded_tensors = has_nested_shards(template)
        exchange: PeerExchange | None = None
        if ranks.world_size > 1:
            exchange = PeerExchange(
                ranks.rank,
                (sockets.find_address() or host_towards(ranks.store_host)) if sockets is not None else "",
                # A user's `commit_tensor` may change a tensor: peers must not get its bytes.
                gives=sockets is not None and inherits_methods(planner, DefaultLoadPlanner, ("commit_tensor",)),
                ports=sockets.ports if sockets is not None else None,
                memory_budget_bytes=memory_budget_bytes,
                is_over=collective.deadline.expired,
            )
        plan, verdict = _plan(
            collective, ranks, planner, keys.template, manifest=manifest, entry=entry, url=store.url, go_on=go_on
        )
    planned_seconds = time.monotonic()
    with operation.phase("reading"):
        collective.set_activity(f"reading step {entry.step}")
        with exchange or nullcontext():
            layers = make_target_layers(manifest, plan, planner, allow_pickle=allow_pickle)
            progress.begin(entry.step)
            _read_layers(
                store,
                manifest,
                layers,
                collective,
                exchange,
                progress=progress,
                memory_budget_bytes=memory_budget_bytes,
            )
            collective.set_activity(f"has read step {entry.step}, waiting for the others")
            # Until then another rank may want what this rank has read.
            collective.gather(exchange.unreached[:1] if exchange is not None else [], _warn_of_unreached)
        keys.apply_loaded()
        if isinstance(planner, RemoteLoadPlanner):
            _drop_kept(state, template, ranks.rank, planner)
        apply_loaded(state, template, ranks.rank, untouched=verdict.untouched)
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
        fallback_bytes=exchange.fallback_bytes if exchange is not None else 0,
        unreached_ranks=len(exchange.unreached) if exchange is not None else 0,
        rereads=counts.reread,
        **_not_loaded(planner, verdict),
    )
    progress.close(str(report) if ranks.is_coordinator else None)
    return report


def _read_layers(
    store: ObjectStore,
    manifest: Manifest,
    layers: Sequence[Sequence[Target]],
    collective: Collective,
    exchange: PeerExchange | None,
    *,
    progress: Progress,
    memory_budget_bytes: int,
) -> None:
    """Read the layers one after another; the first, which holds nearly everything, together with the other ranks.

    Args:
        store: Store of the run.
        manifest: Manifest of the checkpoint.
        layers: Targets of this rank, as `make_target_layers` returns them.
        collective: Collective operation of all ranks.
        exchange: This rank's part in the exchange; None if there is no other rank.
        progress: Progress of the restore; told of each range.
        memory_budget_bytes: Limit of the buffers beyond the state, in bytes.
    """

    def arrived(key: str, start: int, data: memoryview, stays: bool) -> None:  # noqa: FBT001  # `engine.Arrived`
        progress.add(len(data))
        if exchange is not None:
            exchange.arrived(key, start, data, stays)

    def expect(plan: ReadPlan) -> ReadPlan:
        progress.expect(sum(request.length for request in plan.ranges))
        return plan

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
            plan=expect(plan),
            arrived=arrived,
        )
        exchange.complete()
    for targets in later:
        read_targets(
            store,
            manifest,
            targets,
            memory_budget_bytes=memory_budget_bytes,
            retry_seconds=RANGE_RETRY_SECONDS,
            deadline=collective.deadline,
            plan=expect(plan_reads(manifest, [target.want for target in targets])),
            arrived=arrived,
        )


def _require_no_failure(_answers: Sequence[None]) -> None:
    """Decide nothing: that all ranks arrive shows that none has failed so far."""


def _warn_of_unreached(found: Sequence[Sequence[tuple[Address, str]]]) -> None:
    """Log one warning if ranks did not reach others; called on the coordinator, with an example of each rank."""
    examples = [(rank, *unreached) for rank, several in enumerate(found) for unreached in several]
    if not examples:
        return
    rank, address, cause = examples[0]
    logger.warning(
        "%d of %d ranks did not get what other ranks had read for them, and read from the store instead, which takes "
        "longer (`LoadReport.unreached_ranks`). Rank %d, for example, from rank %d at %s:%d: %s. If the hosts may "
        "connect to each other at some ports or over some interface only, name them: "
        'rank_sockets=RankSockets(ports=(29600, 29700), interface="eth1"); if they may not, rank_sockets=False.',
        len(examples),
        len(found),
        rank,
        address.rank,
        address.host,
        address.port,
        cause,
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of a rank's restore.

    Attributes:
        step: Step or name of the checkpoint; None is the newest.
        options: Options that are given, by name; functions are left out.
    """

    step: int | str | None
    options: Mapping[str, object]

    @classmethod
    def of(cls, step: int | str | None, planner: LoadPlanner, *, must_exist: bool) -> Self:
        """Return the arguments of this rank."""
        options = planner.options if isinstance(planner, RemoteLoadPlanner) else {}
        return cls(step, options | ({"must_exist": True} if must_exist else {}))


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
    store: ObjectStore, requests: Sequence[_Request], *, deadline: Deadline, must_exist: bool, go_on: bool
) -> _Chosen | None:
    """Choose the checkpoint that all ranks ask for; called on the coordinator only."""
    steps = [request.step for request in requests]
    if any(step != steps[0] for step in steps):
        raise InvalidArgumentError(
            "Ranks restore different steps; nothing was restored. Call restore with one step on all ranks.",
            steps=str(steps[:16]),
        )
    # Otherwise a rank would keep values that the others load, such as a part of a replicated model.
    other = next((rank for rank, request in enumerate(requests) if request.options != requests[0].options), None)
    if other is not None:
        raise InvalidArgumentError(
            "Ranks restore with different options; nothing was restored. Call restore with the same options on all "
            "ranks.",
            options=f"rank 0: {dict(requests[0].options)}; rank {other}: {dict(requests[other].options)}",
        )
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
    if go_on:
        warn_of_going_back(catalog, entry, url=store.url)
    data = fetch_entry(store, entry, retry_seconds=_retry_seconds(deadline))
    return _Chosen(entry, data if len(data) * len(steps) <= _MANIFESTS_BYTES_MAX else None)


def _plan(
    collective: Collective,
    ranks: RankGroup,
    planner: LoadPlanner,
    template: dict[str, Any],
    *,
    manifest: Manifest,
    entry: Entry,
    url: str,
    go_on: bool,
) -> tuple[LoadPlan, Verdict]:
    """Return the plan of this rank, and the verdict of the coordinator."""
    metadata = to_dcp_metadata(manifest)
    metadata.storage_meta = SourceMeta(
        checkpoint_id=url, save_id=manifest.save_id, step=entry.step, thinned=entry.thinned, rank=ranks.rank
    )
    planner.set_up_planner(template, metadata, ranks.is_coordinator)
    plan = local_plan(planner)
    verdict = Verdict()
    # torch's own returns the plans unchanged. Plans are large, so they are exchanged only for a user's own method.
    if inherits_methods(planner, RemoteLoadPlanner, ("create_global_plan",)):
        verdict = _agree(collective, ranks, planner, url=url, step=entry.step)
        if go_on and ranks.is_coordinator:
            _warn_of_skipped_keys(planner, url=url, step=entry.step)
    elif not inherits_methods(planner, DefaultLoadPlanner, ("create_global_plan",)):
        plan = collective.scatter(plan, planner.create_global_plan)
    plan = planner.finish_plan(plan)
    if inherits_methods(planner, RemoteLoadPlanner, ("lookup_tensor", "resolve_tensor", "transform_tensor")):
        _require_no_lost_values(manifest, plan, planner, url=url, step=entry.step)
    return plan, verdict


def _require_no_lost_values(
    manifest: Manifest, plan: LoadPlan, planner: RemoteLoadPlanner, *, url: str, step: int
) -> None:
    lost = find_lost_values(manifest, plan, planner.lookup_tensor)
    if lost:
        raise StateMismatchError(
            "Tensors of the state share their memory, as tied weights do, and were saved with different values, of "
            "which one would be lost; nothing was loaded. Untie them.",
            names="; ".join(f"{first} and {second}" for first, second in lost[:10]),
            found=len(lost),
            url=url,
            step=step,
        ).advise(exclude='exclude="<name>" leaves one of them out')


@dataclass(frozen=True, slots=True)
class _CheckDigest:
    """Digest of a rank's check, and whether state and checkpoint of that rank have the same names."""

    digest: bytes
    is_plain: bool


def _agree(collective: Collective, ranks: RankGroup, planner: RemoteLoadPlanner, *, url: str, step: int) -> Verdict:
    """Agree with all ranks that the checkpoint fits; return the verdict of the coordinator, which logs its warning.

    Each rank sends a digest. Only where a rank has something to report, one rank for each digest sends its check.

    Raises:
        StateMismatchError: The checkpoint does not fit the state of some rank; the same error on all ranks.
        InvalidArgumentError: A pattern matches nothing.
    """
    digests: list[bytes] = []

    def choose(sent: Sequence[_CheckDigest]) -> frozenset[int]:
        digests[:] = [one.digest for one in sent]
        first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        return frozenset() if all(one.is_plain for one in sent) else frozenset(first.values())

    def judge(sent: Sequence[StateCheck | None]) -> Verdict:
        by_digest = {digest: check for digest, check in zip(digests, sent, strict=True) if check is not None}
        return collective.run_in_thread(partial(planner.judge, [by_digest[digest] for digest in digests]))

    check = planner.check
    senders = collective.gather(_CheckDigest(check.digest(), check.is_plain), choose)
    if not senders:
        return Verdict()
    verdict = collective.gather(check if ranks.rank in senders else None, judge)
    if verdict.error is not None:
        raise verdict.error
    if verdict.warning and ranks.is_coordinator:
        logger.warning(
            "Restore of step %d of %s: %s `last_load` of the manager lists the names.", step, url, verdict.warning
        )
    return verdict


def _warn_of_skipped_keys(planner: RemoteLoadPlanner, *, url: str, step: int) -> None:
    """Warn of what a script that passes `include` at every start would lose: the optimizer that it has trained."""
    if planner.skipped_keys:
        logger.warning(
            "Restore of step %d of %s: include or exclude leaves out all of %s, which the checkpoint has, so that "
            "training goes on with the values of the state. Pass these options only in the first restore after an "
            "import or a change: a job that starts again would lose what it has trained.",
            step,
            url,
            ", ".join(planner.skipped_keys),
        )


def _drop_kept(state: Mapping[str, Any], template: dict[str, Any], rank: int, planner: RemoteLoadPlanner) -> None:
    """Remove per-rank values and options of optimizers from a loaded template that the planner has left alone."""
    fit_groups(state, template, planner.loads, planner.renamed_parameters())
    own = template.get(PER_RANK_KEY, {}).get(str(rank), {})
    for key in [key for key in own if not planner.loads(f"{PER_RANK_KEY}.{rank}.{key}")]:
        del own[key]


def _not_loaded(planner: LoadPlanner, verdict: Verdict) -> dict[str, Any]:
    """Return the fields of a `LoadReport` on what was not loaded."""
    if not isinstance(planner, RemoteLoadPlanner):
        return {}
    kept, left_out = planner.kept, planner.left_out(verdict)
    return {
        "kept": tuple(kept[:NAMES_LISTED_MAX]),
        "kept_values": len(kept),
        "left_out": tuple(left_out[:NAMES_LISTED_MAX]),
        "left_out_values": len(left_out),
    }


def _require_not_thinned(entry: Entry, template: Mapping[str, Any]) -> None:
    missing = [key for key in entry.thinned if key in template]
    if missing:
        raise InvalidArgumentError(
            "This checkpoint was thinned: retention deleted entries that the state asks for. Leave these keys out of "
            "the state, or restore a newer step.",
            step=entry.step,
            without=", ".join(missing),
        )


def _rename_entries(manifest: Manifest, planner: LoadPlanner, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the name in the state of each entry, without those left out."""
    if not isinstance(planner, RemoteLoadPlanner):
        return {name: name for name in manifest.names()}
    if planner.has_rename_mapping:
        planner.link_names(find_links(state))
    return planner.rename_entries(list(manifest.names()))


def _saved_paths(manifest: Manifest, renamed: Mapping[str, str]) -> set[tuple[str | int, ...]]:
    """Return the paths of entries, as the planner renames them, without those left out and those of empty dicts."""
    flatten = manifest.flatten or {}
    paths = ((name, new, flatten[name]) for name, new in renamed.items() if name in flatten)
    return {path if new == name else rename_path(path, new) for name, new, path in paths}


def _warn_of_empty_places(template: Mapping[str, Any], saved: set[tuple[str | int, ...]]) -> None:
    """Warn of empty dicts of the state below which the checkpoint has values, as of an optimizer without a step."""
    places = empty_places(template)
    depths = {len(place) for place in places}
    below_of = Counter(path[:depth] for path in saved for depth in depths if depth < len(path))
    for place in places:
        if below := below_of[place]:
            logger.warning(
                "%s is empty in the state that is restored, so that %d values of the checkpoint are left out. An "
                "optimizer, which has no state before its first step, must itself be in the state.",
                ".".join(map(str, place)),
                below,
            )


def _warn_of_other_world_size(
    state: Mapping[str, Any], manifest: Manifest, saved: set[tuple[str | int, ...]], world_size: int
) -> None:
    """Warn of `PerRank` values that stay as they are, and of those of the checkpoint that no rank gets."""
    keys = sorted(key for key, value in state.items() if type(value) is PerRank)
    ranks = range(max(world_size, manifest.world_size))
    unsaved = [key for key in keys if all((PER_RANK_KEY, str(rank), key) not in saved for rank in ranks)]
    if unsaved:
        logger.warning("The checkpoint has no values of %s, which stay as they are.", ", ".join(unsaved))
    keys = [key for key in keys if key not in unsaved]
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
                "The checkpoint was saved by %s and is restored by %d: %s (%s). What was saved can be read by "
                "dcp_remote.load(url, step=%d, keys='per_rank.*').",
                format_count(manifest.world_size, "rank"),
                world_size,
                message,
                ", ".join(named),
                manifest.run.step if manifest.run is not None else 0,
            )
