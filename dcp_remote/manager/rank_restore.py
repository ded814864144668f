"""One rank's part of a restore from a run: agree on the checkpoint, read, agree that no rank failed."""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import LoadPlan

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.hedging import is_far
from dcp_remote.common.text import format_count
from dcp_remote.common.threads import begin_early
from dcp_remote.common.units import KiB, MiB
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, StateMismatchError
from dcp_remote.format.catalog import Entry, Owner
from dcp_remote.format.manifest import Manifest
from dcp_remote.format.segments import find_segments
from dcp_remote.loading.dcp_metadata import SourceMeta, to_dcp_metadata
from dcp_remote.loading.engine import Target, read_targets
from dcp_remote.loading.load_options import LoadOptions, rename_path
from dcp_remote.loading.overlapping_templates import find_lost_values
from dcp_remote.loading.peer_sockets import RankSockets, host_towards
from dcp_remote.loading.peers import Address, Announcement, PeerExchange, cohorts_of
from dcp_remote.loading.planner import RemoteLoadPlanner
from dcp_remote.loading.read_items import make_target_layers
from dcp_remote.loading.read_plan import ReadPlan, plan_reads
from dcp_remote.loading.state_check import StateCheck
from dcp_remote.loading.state_verdict import Verdict
from dcp_remote.manager.progress import Progress
from dcp_remote.manager.random_states import RandomStates
from dcp_remote.manager.reports import NAMES_LISTED_MAX, LoadReport, LoadSeconds
from dcp_remote.manager.sharing_store import SharingStore
from dcp_remote.manager.telemetry import Operation
from dcp_remote.run.info import catalog_of
from dcp_remote.run.job import warn_of_going_back
from dcp_remote.run.lookup import (
    decode_entry,
    expect_entry,
    fetch_entry,
    find_entry,
    find_newest,
    join_segments,
    no_run,
    require_no_checkpoint_by_itself,
)
from dcp_remote.saving.dedup import Baseline
from dcp_remote.serialization.leaves import iterate_leaves
from dcp_remote.serialization.module_state import MadeStates, is_left_to_torch
from dcp_remote.serialization.name_links import find_links
from dcp_remote.serialization.opaque import Opaque, is_stateful
from dcp_remote.serialization.state_dict import (
    PER_RANK_KEY,
    PerRank,
    apply_loaded,
    fit_groups,
    make_template,
)
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

logger = logging.getLogger(__name__)

# Bytes of the manifest, times the ranks, up to which the coordinator sends it to all ranks, over the one host of their
# group's store. A larger manifest is read by each rank from the object store, which has many hosts.
_MANIFESTS_BYTES_MAX = 256 * MiB

# Bytes of a check up to which each rank sends the check itself, and not only its digest.
_CHECK_BYTES_MAX = 4 * KiB


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of `CheckpointManager.restore`."""

    step: int | str | None
    options: LoadOptions
    must_exist: bool
    go_on: bool
    starts_over: bool = False  # the run's checkpoints are left behind, on purpose

    def shared(self) -> dict[str, object]:
        """Return what all ranks must give alike: step and options, without functions, which cannot be compared."""
        return {"step": self.step} | self.options.comparable | ({"must_exist": True} if self.must_exist else {})


@dataclass(frozen=True, slots=True)
class _Asked:
    """Request of a rank."""

    options: Mapping[str, object]  # those that all ranks must give alike
    runs_foreign_code: bool  # see the function of this name
    makes_state: bool  # by a function of the step


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Checkpoint to restore, with its manifest as stored; None if each rank reads that from the store."""

    entry: Entry
    owner: Owner  # of the run, when its catalog was read
    manifest: bytes | None
    early_reads_in_vain: int
    latency_seconds: float  # latency of the store, measured by the coordinator; 0 if it measures none
    runs_foreign_code: bool  # on any rank
    makes_state: bool  # on any rank


@dataclass(frozen=True, slots=True)
class _Ready:
    """Message of a rank that is ready to read."""

    digest: bytes  # of the check
    check: StateCheck | None  # None for a large one, which is sent later by one rank for all with its digest
    announcement: Announcement | None  # None from a single rank


@dataclass(frozen=True, slots=True)
class _Go:
    """Answer to the ranks of a cohort that are ready to read."""

    verdict: Verdict | None  # None until the senders have sent their checks
    senders: frozenset[int]
    cohort: Mapping[int, Announcement]


class Restored(NamedTuple):
    """Result of a restore."""

    report: LoadReport
    owner: Owner  # of the run, when the checkpoint was chosen
    # Save and manifest key of the checkpoint, and what its manifest says, for the next save. None if values of the
    # state or of the checkpoint were left out: the next save may then write what is in segments that were not read.
    baseline: tuple[tuple[str, str], Baseline] | None


@dataclass(frozen=True, slots=True)
class RankRestore:
    """One restore as one rank carries it out; errors are those of `CheckpointManager.restore`."""

    ranks: RankGroup
    collective: Collective
    store: CountingStore  # opened at the run
    request: Request
    operation: Operation
    progress: Progress
    sockets: RankSockets | None  # None: each rank reads for itself
    allow_pickle: bool
    memory_budget_bytes: int  # of the buffers beyond the state

    def load(
        self, make_state: Callable[[int], MutableMapping[str, Any]], *, runs_foreign_code: bool, makes_state: bool
    ) -> Restored | None:
        """Restore a checkpoint, in the block of the collective; None if the newest is asked for and there is none.

        `make_state` returns the state for a step; `makes_state` if it is the user's function. `runs_foreign_code` is
        what the function of this name returns of the state, or True if the state is not known yet.

        Ranks meet three times: to choose the checkpoint, before a byte is read, and before a value is applied. Where
        objects of the state run code that is not torch's, also after that; and, if each rank has read the manifest from
        the store or a function has made the state, before it.
        """
        began_seconds, before = time.monotonic(), self.store.counts
        collective = self.collective
        with ExitStack() as opened:
            # After a mismatch the optimizers have no states that they did not have before.
            with self.operation.phase("planning"), MadeStates() as made:
                collective.set_activity("asking which checkpoint to restore")
                read: list[bytes] = []  # on the coordinator: the manifest as stored, also if it is not sent
                chosen = collective.gather(
                    _Asked(self.request.shared(), runs_foreign_code, makes_state),
                    lambda asked: collective.run_in_thread(partial(self._choose, asked, read)),
                )
                if chosen is None:
                    return None
                entry, owner, latency_seconds = chosen.entry, chosen.owner, chosen.latency_seconds
                runs_foreign_code = chosen.runs_foreign_code
                in_vain = chosen.early_reads_in_vain if self.ranks.is_coordinator else 0
                collective.set_activity(f"planning the restore of step {entry.step}")
                manifest = collective.run_in_thread(partial(self._decode, chosen, read))
                state = make_state(entry.step)
                if runs_foreign_code and (chosen.manifest is None or chosen.makes_state):
                    # It may call collectives of torch next, in which a rank would hang without those that have failed.
                    collective.gather(None, _require_no_failure)
                del chosen
                read.clear()
                exchange = opened.enter_context(self._exchange()) if self.ranks.world_size > 1 else None
                manifest, planner, plan, renamed_parameters = self._plan(entry, manifest, state, made)
                layers = make_target_layers(manifest, plan, planner, allow_pickle=self.allow_pickle)
                wants = [target.want for target in layers[0]]
                announcement = exchange.listen(manifest, wants) if exchange is not None else None
                verdict, cohort = self._agree(planner, announcement, entry.step)
            planned_seconds = time.monotonic()
            with self.operation.phase("reading"):
                collective.set_activity(f"reading step {entry.step}")
                self.progress.begin(entry.step)
                self._read_layers(manifest, layers, exchange, cohort, latency_seconds)
                compared, template = planner.comparison, planner.original_state_dict
                left_out = compared.left_out(verdict.left_out)
                baseline = None
                if not (compared.kept or left_out):
                    baseline = (entry.save_id, entry.manifest), Baseline.of_manifest(manifest)
                collective.set_activity(f"has read step {entry.step}, waiting for the others")
                # Until then another rank may want what this rank has read, and a value is applied only if all can be.
                collective.gather(exchange.unreached[:1] if exchange is not None else [], _warn_of_unreached)
                opened.close()
                fit_groups(state, template, compared.sources.__contains__, renamed_parameters)
                apply_loaded(state, template, self.ranks.rank, untouched=verdict.untouched)
                if runs_foreign_code:
                    collective.gather(None, _require_no_failure)
        counts = self.store.counts.since(before)
        report = LoadReport(
            step=entry.step,
            save_id=entry.save_id,
            saved_world_size=manifest.world_size,
            world_size=self.ranks.world_size,
            read_bytes=counts.got_bytes,
            seconds=LoadSeconds(planning=planned_seconds - began_seconds, reading=time.monotonic() - planned_seconds),
            requests=counts.requests,
            retries=counts.failed,
            received_bytes=exchange.received_bytes if exchange is not None else 0,
            fallback_bytes=exchange.fallback_bytes if exchange is not None else 0,
            unreached_ranks=len(exchange.unreached) if exchange is not None else 0,
            rereads=counts.reread,
            early_reads_in_vain=in_vain,
            kept=tuple(compared.kept[:NAMES_LISTED_MAX]),
            kept_values=len(compared.kept),
            left_out=tuple(left_out[:NAMES_LISTED_MAX]),
            left_out_values=len(left_out),
            created=entry.created,
        )
        self.progress.close(str(report) if self.ranks.is_coordinator else None)
        return Restored(report, owner, baseline)

    # ---- which checkpoint

    def _choose(self, asked: Sequence[_Asked], read: list[bytes]) -> _Chosen | None:
        """Choose the checkpoint that all ranks ask for; called on the coordinator only. `read` gets the manifest."""
        # With other options a rank would keep values that the others load, such as a part of a replicated model.
        other = next((rank for rank, one in enumerate(asked) if one.options != asked[0].options), None)
        if other is not None:
            raise InvalidArgumentError(
                "Ranks restore different steps, or with different options; nothing was restored. Call restore with the "
                "same step and options on all ranks.",
                options=f"rank 0: {asked[0].options}; rank {other}: {asked[other].options}",
            )
        step, store, retry_seconds = self.request.step, self.store, self._retry_seconds
        with (
            begin_early(
                lambda clock: catalog_of(store, retry_seconds=retry_seconds(), clock=clock), at_once=is_far(store.url)
            ) as read_early,
            expect_entry(store, step, retry_seconds=retry_seconds()) as expected,
        ):
            # Refused before training begins, because the first save would be refused hours later.
            require_no_checkpoint_by_itself(RetryingStore(store, Deadline(retry_seconds())))
            catalog, request = read_early(), self.request
            newest = partial(
                find_newest,
                catalog,
                store,
                must_exist=request.must_exist,
                starts_over=request.starts_over,
                retry_seconds=retry_seconds(),
            )
            if step is None and newest() is None:
                return None
            if catalog is None:
                assert step is not None, "find_newest returned"
                raise no_run(RetryingStore(store, Deadline(retry_seconds())), step)
            entry = find_entry(catalog, step, url=store.url)
            if self.request.go_on:
                warn_of_going_back(catalog, entry, url=store.url)
            data = expected.fetch(entry, retry_seconds=retry_seconds())
        read.append(data)
        sent = data if len(data) * len(asked) <= _MANIFESTS_BYTES_MAX else None
        return _Chosen(
            entry,
            Owner(catalog.run_id, catalog.token),
            sent,
            int(expected.was_wrong),
            store.latency_seconds,
            runs_foreign_code=any(one.runs_foreign_code for one in asked),
            makes_state=any(one.makes_state for one in asked),
        )

    def _decode(self, chosen: _Chosen, read: Sequence[bytes]) -> Manifest:
        """Decode the manifest, which is read if the coordinator did not send it, and once more if it is damaged."""
        data = read[0] if read else chosen.manifest
        if data is None:
            data = fetch_entry(self._documents, chosen.entry, retry_seconds=self._retry_seconds())
        return decode_entry(self.store, chosen.entry, data, retry_seconds=self._retry_seconds(), whole=False)

    @property
    def _documents(self) -> SharingStore:
        return SharingStore(self.store, self.collective.share)

    def _retry_seconds(self) -> float:
        """Return the seconds for which one request is retried."""
        return min(RANGE_RETRY_SECONDS, self.collective.deadline.remaining_seconds())

    # ---- whether the checkpoint fits

    def _plan(
        self, entry: Entry, manifest: Manifest, state: MutableMapping[str, Any], made: MadeStates
    ) -> tuple[Manifest, RemoteLoadPlanner, LoadPlan, Mapping[str, Mapping[str, str | None]]]:
        """Compare state and checkpoint, and list what this rank wants.

        Returns the manifest (of one in segments, with the chunks of those that this rank needs), the planner with the
        template, the plan, and the new names of parameters, as `fit_groups` takes them.
        """
        options, names, rank = self.request.options, list(manifest.names()), self.ranks.rank
        links = find_links(state) if isinstance(options.rename, Mapping) else []
        renamed, parameters = options.rename_entries(names, links)
        saved = _saved_paths(manifest, renamed)
        keep = partial(options.keep, saved=set(renamed.values()))
        template = make_template(state, rank, saved, keep=keep, made=made)
        if self.ranks.is_coordinator:
            _warn_of_other_world_size(state, manifest, saved, self.ranks.world_size)
        planner = RemoteLoadPlanner(**vars(options))
        metadata = to_dcp_metadata(manifest)
        metadata.storage_meta = SourceMeta(
            checkpoint_id=self.store.url, step=entry.step, thinned=entry.thinned, rank=rank, renamed=renamed
        )
        planner.set_up_planner(template, metadata, self.ranks.is_coordinator)
        if manifest.segments is not None:
            needed = find_segments(manifest, planner.wanted_boxes())
            random.Random(rank).shuffle(needed)  # ranks that share segments begin with different ones
            join = partial(join_segments, self._documents, manifest, needed, retry_seconds=self._retry_seconds())
            manifest = self.collective.run_in_thread(join)
            planner.metadata = replace(to_dcp_metadata(manifest), storage_meta=metadata.storage_meta)
        plan = planner.create_local_plan()
        if manifest.segments is not None and (uncovered := planner.find_uncovered(plan)) is not None:
            raise CorruptCheckpointError(
                "The segments of the manifest lack chunks of a tensor. Use another checkpoint.",
                url=self.store.url,
                tensor=uncovered,
            )
        if lost := find_lost_values(manifest, plan, planner.lookup_tensor):
            raise StateMismatchError(
                "Tensors of the state share their memory, as tied weights do, and were saved with different values, of "
                "which one would be lost; nothing was loaded. Untie them.",
                names="; ".join(f"{first} and {second}" for first, second in lost[:10]),
                found=len(lost),
                url=self.store.url,
                step=entry.step,
            ).advise(exclude='exclude="<name>" leaves one of them out')
        return manifest, planner, plan, parameters

    def _agree(
        self, planner: RemoteLoadPlanner, announcement: Announcement | None, step: int
    ) -> tuple[Verdict, Mapping[int, Announcement]]:
        """Agree with all ranks that the checkpoint fits, and who reads together; return the verdict and the cohort.

        All ranks arrive here, so that none has failed before a byte is read. If the checkpoint does not fit the state
        of some rank, or a pattern matches nothing, all ranks raise one error. The coordinator logs warnings. Where
        checks are large, one rank for each digest of a check sends it in a further round.
        """
        digests: list[bytes] = []
        checks: dict[bytes, StateCheck] = {}

        def judge() -> Verdict:
            if all(one.is_plain for one in checks.values()):
                return Verdict()
            return self.collective.run_in_thread(partial(planner.judge, [checks[digest] for digest in digests]))

        def decide(sent: Sequence[_Ready]) -> list[_Go]:
            digests[:] = [one.digest for one in sent]
            checks.update((one.digest, one.check) for one in sent if one.check is not None)
            first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
            senders = frozenset(rank for digest, rank in first.items() if digest not in checks)
            verdict = judge() if not senders else None
            announced = [one.announcement for one in sent if one.announcement is not None]
            cohorts = cohorts_of(announced) if announced else [dict[int, Announcement]()] * len(sent)
            go = {id(cohort): _Go(verdict, senders, cohort) for cohort in cohorts}
            return [go[id(cohort)] for cohort in cohorts]

        def decide_late(sent: Sequence[StateCheck | None]) -> Verdict:
            checks.update((digest, one) for digest, one in zip(digests, sent, strict=True) if one is not None)
            return judge()

        check = planner.comparison.check
        is_small = len(pickle.dumps(check)) <= _CHECK_BYTES_MAX
        ready = _Ready(check.digest(), check if is_small else None, announcement)
        go = self.collective.scatter(ready, decide)
        verdict = go.verdict
        if verdict is None:
            verdict = self.collective.gather(check if self.ranks.rank in go.senders else None, decide_late)
        if verdict.error is not None:
            raise verdict.error
        if self.ranks.is_coordinator:
            self._warn(planner, verdict, step)
        return verdict, go.cohort

    def _warn(self, planner: RemoteLoadPlanner, verdict: Verdict, step: int) -> None:
        """Log what is kept or left out."""
        if verdict.warning:
            logger.warning(
                "Restore of step %d of %s: %s `last_load` of the manager lists the names.",
                step,
                self.store.url,
                verdict.warning,
            )
        if self.request.go_on and planner.comparison.skipped_keys:
            # A script that passes `include` at every start would lose the optimizer that it has trained.
            logger.warning(
                "Restore of step %d of %s: include or exclude leaves out all of %s, which the checkpoint has, so that "
                "training goes on with the values of the state. Pass these options only in the first restore after an "
                "import or a change: a job that starts again would lose what it has trained.",
                step,
                self.store.url,
                ", ".join(planner.comparison.skipped_keys),
            )

    # ---- reading

    def _exchange(self) -> PeerExchange:
        sockets = self.sockets
        return PeerExchange(
            self.ranks.rank,
            (sockets.find_address() or host_towards(self.ranks.store_host)) if sockets is not None else None,
            ports=sockets.ports if sockets is not None else None,
            memory_budget_bytes=self.memory_budget_bytes,
            is_over=self.collective.deadline.expired,
        )

    def _read_layers(
        self,
        manifest: Manifest,
        layers: Sequence[Sequence[Target]],
        exchange: PeerExchange | None,
        cohort: Mapping[int, Announcement],
        latency_seconds: float,
    ) -> None:
        """Read the layers one after another; the first, which has nearly all, together with the other ranks."""

        def arrived(key: str, start: int, data: memoryview, stays: bool) -> None:  # noqa: FBT001  # `engine.Arrived`
            self.progress.add(len(data))
            if exchange is not None:
                exchange.arrived(key, start, data, stays)

        def expect(plan: ReadPlan) -> ReadPlan:
            self.progress.expect(sum(request.length for request in plan.ranges))
            return plan

        read = partial(
            read_targets,
            manifest=manifest,
            retry_seconds=RANGE_RETRY_SECONDS,
            deadline=self.collective.deadline,
            arrived=arrived,
            latency_seconds=latency_seconds,
        )
        later = layers
        if exchange is not None:
            first, *later = layers
            shared_store, plan = exchange.begin(self.store, manifest, cohort)
            read(shared_store, targets=first, memory_budget_bytes=exchange.budget_bytes, plan=expect(plan))
            exchange.complete()
        for targets in later:
            plan = expect(plan_reads(manifest, [target.want for target in targets]))
            read(self.store, targets=targets, memory_budget_bytes=self.memory_budget_bytes, plan=plan)


def runs_foreign_code(state: object) -> bool:
    """Return whether objects of a state make or take their values by code that is neither torch's nor of this package.

    Such code may fail on one rank alone, or call collectives of torch, as the older FSDP does.
    """
    for leaf in iterate_leaves(dict(state) if isinstance(state, Mapping) else state):
        value = leaf.value.value if isinstance(leaf.value, PerRank | Opaque) else leaf.value
        if is_stateful(value) and not isinstance(value, RandomStates) and not is_left_to_torch(value):
            return True
    return False


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


def _saved_paths(manifest: Manifest, renamed: Mapping[str, str]) -> set[tuple[str | int, ...]]:
    """Return the paths of entries, as the planner renames them, without those left out and those of empty dicts."""
    flatten = manifest.flatten or {}
    paths = ((name, new, flatten[name]) for name, new in renamed.items() if name in flatten)
    return {path if new == name else rename_path(path, new) for name, new, path in paths}


def _warn_of_other_world_size(
    state: Mapping[str, Any], manifest: Manifest, saved: set[tuple[str | int, ...]], world_size: int
) -> None:
    """Warn of `PerRank` values that stay as they are, and of those of the checkpoint that no rank gets."""
    keys = sorted(key for key, value in state.items() if type(value) is PerRank)
    ranks = range(max(world_size, manifest.world_size))
    ranks_of = {key: {rank for rank in ranks if (PER_RANK_KEY, str(rank), key) in saved} for key in keys}
    unsaved = [key for key, saved_by in ranks_of.items() if not saved_by]
    if unsaved:
        logger.warning("The checkpoint has no values of %s, which stay as they are.", ", ".join(unsaved))
    kept = [key for key, saved_by in ranks_of.items() if saved_by and not saved_by.issuperset(range(world_size))]
    left = [key for key, saved_by in ranks_of.items() if max(saved_by, default=-1) >= world_size]
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
