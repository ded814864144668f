"""CheckpointManager: the checkpoints of a training run, saved in the background, committed, kept tidy, restored.

Ranks speak to each other over the store of the process group, never by its collectives: nothing can wake a rank that
waits in a collective, and checkpoint traffic shares neither a group nor a thread with training.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self, SupportsFloat

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from dcp_remote.at_exit import AtExit
from dcp_remote.desk import Desk
from dcp_remote.devices import wait_for_devices
from dcp_remote.digests import digest
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, SaveFailedError, SaveTimeoutError
from dcp_remote.flight import Flight
from dcp_remote.flights import Flights
from dcp_remote.joint import Joint
from dcp_remote.load_rank import load_rank
from dcp_remote.location import Location, require_budget, require_shared, require_timeout
from dcp_remote.manifest_json import checked_user
from dcp_remote.per_rank import saved_state
from dcp_remote.preemption import Preemption
from dcp_remote.ranks import Ranks
from dcp_remote.reports import LoadReport, SaveReport
from dcp_remote.retention import Retention
from dcp_remote.run_checkpoints import RunCheckpoints
from dcp_remote.run_save import Job, Note, require_step
from dcp_remote.save_rank import RankSaver, Task
from dcp_remote.staging import Stager, tensors_of
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.telemetry import Telemetry
from dcp_remote.text_keys import require_distinct
from dcp_remote.transfer import MEMORY_BUDGET_BYTES, end_within

logger = logging.getLogger(__name__)

# Half an hour, as a process group gives its collectives.
TIMEOUT_SECONDS = 1800.0

# A rank that says nothing for so long is taken for dead; a busy one says so every second.
SILENCE_SECONDS = 60.0


class CheckpointManager(RunCheckpoints):
    """The checkpoints of one training run; made by every rank, with the same arguments.

    A rank may make one more for itself, to look at the run.

        with CheckpointManager("s3://bucket/run", retention=Retention(keep_last=3)) as checkpoints:
            step = checkpoints.restore(state) or 0
            while step < last:
                ...
                if step % 1000 == 0:
                    checkpoints.save(step, state)

    `save` copies the state and returns; shards are uploaded and the checkpoint is committed meanwhile. One save is
    under way at a time: the next one waits for it, and raises its error. Every rank calls `save`, `restore` and
    `reached_preemption`, in the same order; the rest may be called by any.

    A save ends, on every rank that lives, by its deadline: with a commit, or with an error that names the rank, the
    shard and the cause. A rank that falls silent after its first call ends it a minute later. Killed at any moment, the
    run has the checkpoints that it had, and perhaps the new one, each whole.

    Plans are exchanged by the first save, and again when on any rank anything but values has changed: a name, a shape,
    a dtype. A tensor that several ranks hold, as under DDP or HSDP, is written by one of them; the largest by all of
    them, a part each, if digests of all bits are equal in that very save. If not, one rank's tensor is saved whole,
    and a warning is logged.

    The first save of a job takes the fence: a job that was started earlier can commit nothing more, and is told so
    (`FencedError`). No checkpoint is deleted unless `retention` says so, or a save replaces it.

    Args:
        url: Of the run: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///…`, a path, `memory://name` (one process
            only), or an `ObjectStore` of your own.
        retention: What to keep; None keeps everything.
        process_group: Whose ranks save; None is all. Only its members and its store are used.
        storage_options: Endpoint, region, credentials and so on, by the names that boto3 and fsspec use.
        timeout_seconds: Of a save, from its call on; and of a restore.
        dedup: Do not send again what did not change since the newest checkpoint.
        resumed_from: The step whose state was loaded by other means than `restore`.
        start_over: Leave the run's checkpoints behind: they are marked as abandoned by the first commit.
        silence_seconds: After which a rank that says nothing is taken for dead.
        notice_seconds: How long after SIGTERM this job is killed; see `reached_preemption`. None is not known: saves
            then have their usual time.
        allow_pickle: Also store, and load, objects that only code can load.
        memory_budget_bytes: Bound of the copies in memory beyond the state and its staged copy, per rank.

    Raises:
        InvalidArgumentError: The URL or an option is wrong; or the store is of one process alone and there are several
            ranks. No request is made here.
    """

    _store: CountingStore

    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        retention: Retention | None = None,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, object] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        dedup: bool = True,
        resumed_from: int | None = None,
        start_over: bool = False,
        silence_seconds: float = SILENCE_SECONDS,
        notice_seconds: float | None = None,
        allow_pickle: bool = False,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    ) -> None:
        """See the class."""
        if retention is not None and not isinstance(retention, Retention):
            raise InvalidArgumentError("retention is a Retention.", type=type(retention).__qualname__)
        require_timeout(timeout_seconds)
        require_timeout(silence_seconds, name="silence_seconds")
        require_timeout(timeout_seconds if notice_seconds is None else notice_seconds, name="notice_seconds")
        require_budget(memory_budget_bytes)
        if resumed_from is not None:
            require_step(resumed_from)
            if start_over:
                raise InvalidArgumentError(
                    "A job either goes on from a step or starts over.", resumed_from=resumed_from
                )
        location = Location.of(url, storage_options)
        require_shared(location)
        super().__init__(CountingStore(location.store))
        self._timeout_seconds, self._silence_seconds = timeout_seconds, silence_seconds
        self._allow_pickle, self._memory_budget_bytes = allow_pickle, memory_budget_bytes
        self._is_alone = not _has_group()
        if self._is_alone and os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
            logger.warning(
                "%s: WORLD_SIZE is set, but torch.distributed is not initialized: this process takes itself for the "
                "only one that saves here",
                self._store.url,
            )
        self._ranks = Ranks.of(process_group, f"dcp_remote/{digest(self._store.url.encode()).hex()}")
        self._preemption = Preemption(self._ranks, notice_seconds=notice_seconds)
        job = Job(self._store)
        if resumed_from is not None or start_over:
            job.go_on_from(-1 if resumed_from is None else resumed_from)
        desk = Desk(self._store, job, retention=retention, dedup=dedup) if self._ranks.is_coordinator else None
        self._desk = desk
        self._saver = RankSaver(
            self._ranks, self._store, desk, memory_budget_bytes=memory_budget_bytes, allow_pickle=allow_pickle
        )
        self._stager = Stager()
        self._telemetry = Telemetry()
        self._flights = Flights(self._store.url, self._preemption)
        self._last_load: LoadReport | None = None
        self._closed = False
        self._at_exit = AtExit(self._store.url, self._close)

    def __repr__(self) -> str:
        """The URL; never an option."""
        return f"CheckpointManager({self._store.url!r})"

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; what failed in the background is raised, unless the block raises something itself."""
        try:
            self._close(is_interrupted=kind is KeyboardInterrupt, is_missed=error is not None)
        except Exception:
            if error is None:
                raise
            logger.exception("%s: the last save failed, too", self._store.url)

    @property
    def last_save(self) -> SaveReport | None:
        """Of the last save that was committed and waited for."""
        return self._flights.report

    @property
    def last_load(self) -> LoadReport | None:
        """Of the last `restore`."""
        return self._last_load

    # ---- called by every rank

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | Iterable[str] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        user: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        planner: SavePlanner | None = None,
        wait: bool = False,
    ) -> None:
        """Save a state in the background; called by every rank.

        Waits for the save before, and raises its error. Then the state is copied, into memory that the next save uses
        again (pinned, where there is a GPU), and may be changed as soon as this returns.

        Costs the store: one GET, a PUT per shard of at most 64 MiB, two PUTs and a GET for the commit; a job's first
        save three requests more (fence, a look for a checkpoint by itself, the newest manifest or a LIST).

        Args:
            step: How many steps of training are finished.
            state: What to save: nested dicts of tensors and objects, `Stateful`s, and `PerRank` values.
            name: By which the checkpoint can be asked for, or several; a name moves to the newest that is given it.
            metrics: Numbers, by name; `Retention(keep_best=…)` goes by them. One that is not finite is left out, with a
                warning. The coordinator's count.
            user: Notes for the manifest: JSON, at most 1 MiB. The coordinator's count.
            overwrite: Replace the live checkpoint of this step, if there is one; its names and its pin go with it.
            planner: torch's; None is `DefaultSavePlanner()`. One with methods of its own plans each save anew, and its
                replicas are written by one rank. torch's own cache (`enable_plan_caching`) is not used.
            wait: Return when it is committed. Nothing is copied then.

        Raises:
            InvalidArgumentError: A step, name, metric, note, or the state is wrong; or, told as the next one is, the
                step is older than the newest checkpoint.
            CheckpointExistsError: Of this save if `wait`, else by the next call: see `Job.begin`.
            FencedError: Likewise: a newer job owns the run. Stop this one.
            CommitConflictError: Likewise: another save of this step was committed meanwhile.
            CommitUnknownError: Likewise: the store never said.
            SaveTimeoutError: Likewise: names the ranks that did not report by the deadline, and what they did last.
            SaveFailedError: Likewise: names the rank, the shard, the attempts and the cause.
        """
        called_seconds = time.monotonic()
        self._require_open()
        self._preemption.outlive()
        note = Note.of(step, name=name, metrics=metrics, overwrite=overwrite)
        noted = checked_user(user or {})
        operation = self._telemetry.save(self._store, step=step, rank=self._ranks.rank)
        flight: Flight | None = None
        try:
            with operation.phase("waiting"):
                self.wait()
            waiting_seconds = time.monotonic() - called_seconds
            seconds = min(self._timeout_seconds - waiting_seconds, self._preemption.working_seconds())
            joint = self._prepare(f"the save of step {step}", seconds=seconds)
            flight = Flight(joint, self._ranks, self._saver, self._desk, before=self._flights.newest)
            self._ranks.begin(joint)
            with operation.phase("staging"):
                copied = self._copied(joint, state, stage=not wait)
            task = Task(
                note=note,
                state=copied,
                planner=planner if planner is not None else DefaultSavePlanner(),
                user=noted,
                called_seconds=called_seconds,
                waiting_seconds=waiting_seconds,
                staging_seconds=time.monotonic() - called_seconds - waiting_seconds,
                seconds=seconds,
                operation=operation,
                background=not wait,
            )
            self._flights.start(flight, task)
            if wait:
                self.wait()
        except BaseException as error:
            # Ctrl-C strikes anywhere, and a thread may not start.
            if flight is not None:
                self._flights.abandon(flight, error)
            operation.fail(error)
            raise

    def restore(
        self, state: MutableMapping[str, Any], step: int | str | None = None, *, planner: LoadPlanner | None = None
    ) -> int | None:
        """Load a checkpoint into a state, in place; called by every rank, at any world size.

        The next save goes on from there: what is newer is then marked as abandoned, of which a warning tells here. To
        look at an older checkpoint in the middle of training, use `dcp_remote.load` or `RemoteReader`, which change
        nothing; a `restore` of the newest before the next save undoes going back.

        Tensors are read into those of the state, `Stateful`s and `PerRank` values are told theirs, other objects are
        replaced. A rank that the checkpoint has no `PerRank` values of keeps its own. If it raises, the state holds
        parts of the checkpoint and must not be used.

        Costs: a HEAD, a GET of the catalog and one of the manifest, by the coordinator; one per range of at most 8 MiB,
        by one of the ranks that want it (of up to 64 that want much of the same), which gives it to the others over
        sockets of their own. Where that fails, whoever wants it reads it from the store.

        Args:
            state: As for `save`: says what is wanted, and of what shape.
            step: A step, or a checkpoint's name; None is the newest.
            planner: torch's; None is `DefaultLoadPlanner()`.

        Returns:
            The step; None if `step` is None and the run has no checkpoint: the state is as it was.

        Raises:
            CheckpointNotFoundError: There is none of this step or name.
            CheckpointExistsError: A checkpoint by itself lies at this URL.
            CorruptCheckpointError: Bytes are not those that were written: restore an older step.
            UnsafeObjectError: An object needs code to load.
            StorageError: The store failed for five minutes.
            DcpRemoteError: Another rank failed, or fell silent; names it. Or the restore was not over in
                `timeout_seconds`.
        """
        self._require_open()
        self._preemption.outlive()
        self.wait()
        joint = self._prepare(
            "the restore", seconds=self._timeout_seconds, failed=DcpRemoteError, timed_out=DcpRemoteError
        )
        asked = step if isinstance(step, int) else None
        operation = self._telemetry.load(self._store, step=asked, rank=self._ranks.rank)
        try:
            self._ranks.begin(joint)
            # Here, whatever comes of the restore: at the same place on all ranks.
            self._preemption.count_anew()
            with joint:
                self._last_load = load_rank(
                    self._ranks,
                    joint,
                    self._store,
                    state,
                    step=step,
                    planner=planner,
                    operation=operation,
                    allow_pickle=self._allow_pickle,
                    memory_budget_bytes=self._memory_budget_bytes,
                )
        except BaseException as error:
            self._ranks.abandon(joint, error)
            operation.fail(error)
            raise
        operation.end(self._last_load)
        if self._last_load is None:
            return None
        if self._desk is not None:
            self._desk.go_on_from(self._last_load.step)
        return self._last_load.step

    def reached_preemption(self, step: int) -> bool:
        """Whether this is the step at which to save and stop, because the job is about to be killed.

        Called by every rank after every step. SIGTERM reaches ranks at different times, and some never: they agree on
        one step, at which this is True on all of them. From the first call on, SIGTERM no longer ends the process;
        a handler of your own that was installed before is called as well.
        Saves and restores end within `notice_seconds` of it, less 8 s for the end of the process, or are given up.

            stopping = checkpoints.reached_preemption(step)
            if stopping or step % 1000 == 0:
                checkpoints.save(step, state)
            if stopping:
                break

        Costs nothing as long as there is no signal.
        """
        self._require_open()
        require_step(step)
        self._preemption.install()
        return self._preemption.reached(step)

    # ---- called by any rank

    def wait(self) -> SaveReport | None:
        """Return when no save is under way: the report of the last one that was committed.

        Raises:
            DcpRemoteError: The save failed; see `save`. Raised once.
        """
        return self._flights.wait()

    def close(self) -> None:
        """Wait for the save under way, finish keeping the run tidy, and let go of everything.

        Ctrl-C says what is waited for, and until when; once more, and the save is given up. After SIGTERM all this is
        over within `notice_seconds` of it.

        Raises:
            DcpRemoteError: The last save failed.
        """
        self._close(is_interrupted=False)

    # ----

    def _close(self, *, is_interrupted: bool, is_missed: bool = False) -> None:
        """Close it; see `Flights.close` and `Ranks.close`."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        gives_up = False
        try:
            self._flights.close(is_interrupted=is_interrupted)
        except KeyboardInterrupt:
            gives_up = True
            raise
        finally:
            self._stager.close()
            # The process still has to end.
            seconds = 0.0 if gives_up else self._preemption.remaining_seconds()
            end_within(math.inf if seconds is None else 0.0)
            self._preemption.close()
            self._ranks.close(math.inf if seconds is None else seconds / 2, is_missed=is_missed)

    def _copied(self, joint: Joint, state: Mapping[str, Any], *, stage: bool) -> dict[str, Any]:
        copied = saved_state(state, self._ranks.rank)
        require_distinct(copied)
        if not stage:
            # Here, and not in the thread that saves: that knows nothing of this one's stream.
            wait_for_devices(tensor.device for tensor in tensors_of(copied))
            return copied
        joint.note("copying the state")
        return self._stager.stage(copied)

    def _prepare(
        self,
        what: str,
        *,
        seconds: float,
        failed: type[DcpRemoteError] = SaveFailedError,
        timed_out: type[DcpRemoteError] = SaveTimeoutError,
    ) -> Joint:
        if self._is_alone and _has_group() and dist.get_world_size() > 1:
            raise InvalidArgumentError(
                "This CheckpointManager was made before torch.distributed was initialized, and knows of no other rank; "
                "make it afterwards.",
                url=self._store.url,
            )
        return self._ranks.prepare(
            what,
            seconds=seconds,
            silence_seconds=self._silence_seconds,
            left_seconds=self._preemption.working_seconds,
            failed=failed,
            timed_out=timed_out,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("This CheckpointManager was closed.", url=self._store.url)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
