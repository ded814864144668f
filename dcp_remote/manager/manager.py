"""CheckpointManager: saves the checkpoints of a training run in the background, applies retention, and restores.

Ranks speak to each other over the key-value store of the process group, never by its collectives: nothing can wake a
rank that waits in a collective, and checkpoint traffic shares neither a group nor a thread with training.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn

from dcp_remote.common.digests import digest
from dcp_remote.common.threads import limit_exit_wait
from dcp_remote.common.tracebacks import hides_frames
from dcp_remote.common.units import MEMORY_BUDGET_BYTES
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup, default_world_size
from dcp_remote.coordination.outcome import Terms
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, SaveFailedError, SaveTimeoutError
from dcp_remote.format.manifest_json import checked_user
from dcp_remote.loading.load_options import LoadOptions, Patterns, Rename
from dcp_remote.loading.peer_sockets import RankSockets, check_rank_sockets
from dcp_remote.loading.run_handle import Run
from dcp_remote.manager.background_save import AtExit, BackgroundSave, BackgroundSaves, OnError, may_pass
from dcp_remote.manager.coordinator import Coordinator
from dcp_remote.manager.first_save import FirstSave
from dcp_remote.manager.preemption import Preemption
from dcp_remote.manager.progress import Progress, ProgressSetting, check_progress
from dcp_remote.manager.rank_restore import RankRestore, Request, runs_foreign_code
from dcp_remote.manager.rank_save import RankSaver
from dcp_remote.manager.reports import LoadReport, SaveReport
from dcp_remote.manager.save_planning import Replicas, Task, require_one_kind
from dcp_remote.manager.save_policy import SavePolicy, SaveSchedule
from dcp_remote.manager.telemetry import Telemetry
from dcp_remote.manager.updates import Updates
from dcp_remote.run.job import CheckpointLabels, JobSession, require_step, require_step_or_name
from dcp_remote.run.lookup import as_step
from dcp_remote.run.retention import ChooseToDelete, Retention, require_retention
from dcp_remote.saving.device_copy import wait_for_devices
from dcp_remote.saving.late_copies import LateCopies
from dcp_remote.saving.packing import require_shard_bytes
from dcp_remote.saving.plan_cache import RunPlanner
from dcp_remote.saving.staging import Stager, tensors_of
from dcp_remote.serialization.leaves import FlatState
from dcp_remote.serialization.state_dict import TensorRoles, as_state, build_saved_state
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.location import Location, join_job, require_budget, require_choice, require_timeout
from dcp_remote.storage.outages import name_speaker

logger = logging.getLogger(__name__)

# As long as a process group waits for its collectives by default.
TIMEOUT_SECONDS = 1800.0

# A rank without a heartbeat for so long counts as dead; a rank that is busy sends one every second.
SILENCE_SECONDS = 60.0

# Time in which all ranks come to a save or restore: training keeps them within a step of each other.
ARRIVAL_SECONDS = 30.0
# The first restore waits longer, by this factor: ranks that load weights and compile may be minutes apart.
_FIRST_RESTORE_FACTOR = 10

# Rule for a background save that comes while another is under way.
WhenBusy: TypeAlias = Literal["wait", "skip"]


class CheckpointManager:
    """Checkpoints of one training run; every rank makes a manager, with the same arguments.

    A rank may make another manager for itself, to look at the run. If its `with` block is left by an error, the other
    ranks take that rank for silent until it saves or restores.

        with CheckpointManager("s3://bucket/run", retention=Retention(keep_last=3)) as checkpoints:
            step = checkpoints.restore(state) or 0
            while step < last:
                ...
                if step % 1000 == 0:
                    checkpoints.save(step, state)

    `save` copies the state and returns; a thread uploads the shards and commits the checkpoint. One save is under way
    at a time: the next `save` waits for it, and raises its error. One thread of every rank calls `save`, `restore`,
    `should_save` and `reached_preemption`, in the same order; any rank may call the methods of `run`.

    A save ends by its deadline on every rank that lives: with a commit, or with an error that names the rank, the
    shard and the cause. A rank that does not call `save` within `arrival_seconds` of the others, as under
    `if rank == 0`, ends it with an error that says where that rank is; if the rank comes later, its call raises the
    same error at once. A rank that falls silent after its first call ends the save a minute later. If the job is killed
    at any moment, the run has the checkpoints that it had, and perhaps the new one, each whole.

    The first save exchanges plans; a later save does so again if a name, a shape or a dtype has changed on any rank.
    A tensor that several ranks hold, as under DDP or HSDP, is written by one of them: the largest first, each by the
    rank with the least to write. In the first save of a job with a name, digests of all bits of such tensors are
    compared before the upload: if ranks hold different values, every rank raises `InvalidArgumentError`, which names
    the tensors and the ranks (see `replicas`). Later saves compare none of them: a tensor that has come to differ is
    saved as the rank that writes it holds it.

    Of buffers of modules, objects, and numbers (tensors without dimensions) that are neither parameters nor states of
    optimizers, ranks may hold different values, and each save holds that of the lowest rank that has one. A job says so
    once of each name: of buffers at level INFO, since under DDP each forward pass makes statistics differ.

    The first save of a job takes the fence: jobs that were started earlier can commit, delete, name and pin nothing
    more, and raise `FencedError`. Checkpoints are deleted only by `retention` and `run.delete`, or when a save
    replaces them.

    Args:
        url: URL of the run: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///…`, a path, `memory://name` (one process
            only), or an `ObjectStore` of your own.
        retention: Rules by which old checkpoints are deleted; or a function that gets the list of `CheckpointInfo`s
            that are not abandoned, by ascending step, and returns the steps to delete (never the newest or a pinned
            one, whatever it returns). Rank 0 calls it after each commit, perhaps several times, in a thread; what it
            raises is logged, counted in `retention_failures`, and deletes nothing. None keeps all checkpoints.
        process_group: Group of the ranks that save; None is the default group. Only its members and its store are used.
        storage_options: Endpoint, region, credentials and so on, by the names that boto3 and fsspec use.
        timeout_seconds: Deadline of one save or restore, in seconds from the call; 1800.
        dedup: True if data that did not change since the newest checkpoint is reused instead of sent again.
        replicas: "equal" to refuse the first save with a tensor of which ranks hold different values, unless it is a
            buffer, or with options of an optimizer's groups that differ. "coordinator" to compare no values, and save
            those of the lowest rank that holds the tensor: for ranks that train apart for a while, as in local SGD. The
            argument of rank 0 counts. Never compared are tensors of a subclass other than `DTensor`.
        resumed_from: Step whose state was loaded by other means than `restore`.
        start_over: True to leave the run's checkpoints behind: the first commit marks them as abandoned.
        silence_seconds: Seconds without a heartbeat after which a rank counts as dead; 60.
        arrival_seconds: Seconds for which a save or restore waits for ranks that have not called it and are in no other
            call of this package; 30. Ten times as long in the first restore, before which ranks load and compile.
        save_policy: Rules by which `should_save` answers.
        notice_seconds: Seconds from SIGTERM until this job is killed, see `reached_preemption`; None if that is not
            known, and saves keep their usual deadline.
        allow_pickle: True to store and load objects that only code can load.
        memory_budget_bytes: Bound in bytes, per rank, of the copies beyond the state and its staged copy; 256 MiB.
        progress: True to draw a bar of tqdm on the terminal or in the notebook of rank 0, or else to log a line a
            minute; False for neither; a function to call with a `ProgressReport` about once a second, on rank 0.
        rank_sockets: False to open no sockets between ranks, so that a restore reads for each rank what it wants; or a
            `RankSockets` with the interface and the ports that ranks may use.
        when_busy: "skip" to leave a save out, on all ranks, while another is under way on rank 0: `save` returns False,
            and `skipped_saves` counts. Not left out are saves with `wait=True`, as the last of a job should be, and
            those once `should_stop` is true. A failed save is under way no more: the next `save` raises its error.
            Costs a message per rank, for which a rank waits until rank 0 has called `save` or `arrival_seconds`.
        on_error: "warn" to go on, on all ranks, after a background save that failed: the failure is logged and counted
            in `failed_saves`, and the next save is tried. Raised all the same are `FencedError`, errors of the call and
            of the state, those with `wait=True`, and by `close` that of the last save if none was committed since.
        shard_bytes: Size of the shards in bytes, from 1 MiB to 64 MiB; None for 8 MiB to 64 MiB, by the bytes of the
            rank, so that shards that are sent at once end together.

    Raises:
        InvalidArgumentError: The URL or an option is wrong; or only one process sees the store, and there are several
            ranks. No request is sent here.
    """

    # Saves that were left out (`when_busy`), and background saves that failed and let this rank go on (`on_error`).
    skipped_saves = 0
    failed_saves = 0

    # Error of the last failed save that let this rank go on, and the report of the last save committed before.
    _passed: tuple[BaseException, SaveReport | None] | None = None
    _is_last_skipped = False

    @hides_frames
    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        retention: Retention | ChooseToDelete | None = None,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, object] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        dedup: bool = True,
        replicas: Replicas = "equal",
        resumed_from: int | None = None,
        start_over: bool = False,
        silence_seconds: float = SILENCE_SECONDS,
        arrival_seconds: float = ARRIVAL_SECONDS,
        save_policy: SavePolicy | None = None,
        notice_seconds: float | None = None,
        allow_pickle: bool = False,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        progress: ProgressSetting = True,
        rank_sockets: bool | RankSockets = True,
        when_busy: WhenBusy = "wait",
        on_error: OnError = "raise",
        shard_bytes: int | None = None,
    ) -> None:
        """Check and store the settings; no request is sent, and no other rank is asked."""
        require_retention(retention)
        require_timeout(timeout_seconds)
        if save_policy is not None and not isinstance(save_policy, SavePolicy):
            raise InvalidArgumentError(
                "save_policy must be a SavePolicy, such as SavePolicy(every_steps=1000).",
                type=type(save_policy).__qualname__,
            )
        require_timeout(silence_seconds, name="silence_seconds")
        require_timeout(arrival_seconds, name="arrival_seconds")
        require_timeout(timeout_seconds if notice_seconds is None else notice_seconds, name="notice_seconds")
        require_budget(memory_budget_bytes)
        rules = (("replicas", replicas, Replicas), ("when_busy", when_busy, WhenBusy), ("on_error", on_error, OnError))
        for name, value, choices in rules:
            require_choice(name, value, get_args(choices))
        require_shard_bytes(shard_bytes, memory_budget_bytes)
        check_progress(progress)
        self._progress, self._rank_sockets = progress, check_rank_sockets(rank_sockets)
        if resumed_from is not None:
            require_step(resumed_from)
            if start_over:
                raise InvalidArgumentError(
                    "resumed_from and start_over exclude each other: pass one of them.", resumed_from=resumed_from
                )
        location = Location.of(url, storage_options)
        join_job(location, default_world_size())
        self._store = CountingStore(location.store)
        self._timeout_seconds, self._silence_seconds = timeout_seconds, silence_seconds
        self._arrival_seconds, self._when_busy, self._on_error = arrival_seconds, when_busy, on_error
        self._allow_pickle, self._memory_budget_bytes = allow_pickle, memory_budget_bytes
        self._is_alone = not _has_group()
        if self._is_alone and os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
            logger.warning(
                "%s: WORLD_SIZE is set, but torch.distributed is not initialized: this process saves as if it were the "
                "only one. Call init_process_group before",
                self._store.url,
            )
        self._ranks = RankGroup.from_process_group(
            process_group, f"dcp_remote/{digest(self._store.url.encode()).hex()}"
        )
        name_speaker(self._store.url, is_speaker=self._ranks.is_coordinator)
        self._preemption = Preemption(self._ranks, notice_seconds=notice_seconds)
        self._schedule = SaveSchedule(save_policy, self._ranks) if save_policy is not None else None
        self._starts_over, self._should_stop = start_over, False
        # Step that was restored or saved last; -1 before that.
        self._last_step = -1 if resumed_from is None else resumed_from
        job = JobSession(self._store)
        if resumed_from is not None or start_over:
            job.resume_from(self._last_step)
        coordinator = (
            Coordinator(self._store, job, retention=retention, dedup=dedup) if self._ranks.is_coordinator else None
        )
        self._coordinator = coordinator
        self._saver = RankSaver(
            self._ranks,
            self._store,
            coordinator,
            memory_budget_bytes=memory_budget_bytes,
            allow_pickle=allow_pickle,
            progress=progress,
            replicas=replicas,
            shard_bytes=shard_bytes,
        )
        self._run = Run(self._store.uncounted, owner=lambda: self._saver.planning.owner)
        self._stager, self._updates = Stager(), Updates()
        self._telemetry = Telemetry()
        if coordinator is not None:
            self._telemetry.observe(self._store, coordinator.background_deletions, lambda: self.skipped_saves)
        self._background_saves = BackgroundSaves(
            self._store.url, self._preemption, lambda: self._store.requests_under_way > 0, on_error=on_error
        )
        self._first_save = FirstSave(self._store.url)
        self._last_load: LoadReport | None = None
        self._closed = False
        self._pid = os.getpid()
        self._at_exit = AtExit(self._store.url, self._close)

    def __repr__(self) -> str:
        """Return the class and the URL; options, which may be secret, are left out."""
        return f"CheckpointManager({self._store.url!r})"

    def __enter__(self) -> Self:
        """Return the manager itself."""
        return self

    @hides_frames
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the manager; raise the error of the last save, unless the block raises an error itself."""
        try:
            self._close(error)
        except Exception:
            if error is None:
                raise
            logger.exception("%s: the last save failed as well", self._store.url)

    @property
    def url(self) -> str:
        """URL of the run."""
        return self._store.url

    @property
    def last_save(self) -> SaveReport | None:
        """Report of the last save that was committed and waited for; None before that."""
        return self._background_saves.report

    @property
    def last_load(self) -> LoadReport | None:
        """Report of the last `restore`; None before that."""
        return self._last_load

    @property
    def should_stop(self) -> bool:
        """True once the loop is to end, after SIGTERM.

        From the step on at which all ranks save and stop; or as soon as they can agree on no such step, since a rank or
        the key-value store is gone or time is short: then without a save, and the log says why.
        """
        return self._should_stop or self._preemption.must_stop

    # ---- called by every rank

    @hides_frames
    def save(
        self,
        step: int,
        state: Mapping[str, Any] | nn.Module | Callable[[], Mapping[str, Any] | nn.Module],
        *,
        name: str | Iterable[str] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        user: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        exist_ok: bool | None = None,
        wait: bool | Literal["begun"] = False,
    ) -> bool:
        """Save a state in the background; called by every rank.

        Waits for the previous save, and raises its error (see `when_busy` and `on_error`). Then copies the state into
        memory that is kept for the next save (pinned, where there is a GPU); the state may be changed as soon as this
        method returns. With `watch` or `before_update`, it returns while the copies are under way.

        Costs the store: one GET, a PUT per shard of at most 64 MiB, two PUTs and a GET for the commit; a job's first
        save two requests more (fence, a look for a checkpoint by itself), and a LIST where the run begins, or a GET of
        the newest manifest by each rank, unless `restore` has loaded all of that checkpoint.

        Args:
            step: Number of finished training steps.
            state: State to save, as of `training_state`: nested dicts and lists of tensors, objects, modules,
                optimizers and other `Stateful`s, and `PerRank` values. A bare module is saved as `{"model": module}`.
                Or a function that returns the state, called on every rank once all have called `save`, so that it may
                use collectives of torch. If it raises on one rank, that rank raises the error unchanged, the others
                hear of it at once, and nothing is uploaded. Costs two messages per rank.
            name: Name or names by which the checkpoint can be asked for; a name moves to the newest checkpoint that is
                given it. "latest" and "last" are refused: they mean the newest checkpoint wherever a step is taken.
            metrics: Numbers by name, for `Retention(keep_best=…)`. A number that is not finite is left out, with a
                warning. The metrics of the coordinator are stored.
            user: Notes for the manifest: JSON, at most 1 MiB. The notes of the coordinator are stored. Where `exist_ok`
                keeps a checkpoint, notes are dropped with a warning: the manifest never changes.
            overwrite: True to replace the live checkpoint of this step, if there is one, with its names and its pin.
            exist_ok: True to keep the live checkpoint of this step if this job wrote it, or has saved nothing since it
                went on from it: names and metrics are added to it in the catalog, and nothing is uploaded. Costs two
                GETs and a PUT; one GET if there is nothing to add. After a crash all of them are added or none. An
                abandoned checkpoint of this step is replaced also if it has names, which the new one gets. None keeps
                the checkpoint that this job restored or saved last as it is, with a warning, as of a loop that begins
                by a save of the step that it has restored: what has changed in the state since, such as a learning rate
                or random states, is not saved, nor are other metrics. A state with other names, shapes or dtypes than
                the checkpoint is refused, and so is a name that the checkpoint does not have; costs two GETs. False
                refuses each step that is live. The coordinator's argument counts.
            wait: True to return only when the checkpoint is committed. The state is then not copied. "begun" to return
                when every rank has called `save` and copied its state, and the run takes the step: an error of any rank
                until then, and one that does not come, is raised by this call on all ranks. Every loop that would wait
                in a collective of torch for a rank that failed should pass "begun". Costs two messages per rank.

        The errors below the first are raised by this call with `wait=True`; else by the next `save`, `restore` or
        `wait`, or at the end of the block. A save of a step that is not above the last one that this job saved or
        restored waits as with "begun", so that this call raises the error by which the run refuses the step.

        Returns:
            True; False if the save was left out (`when_busy`, on all ranks), or failed before this method returned
            (`on_error`; a rank where it failed a moment later returns True).

        Raises:
            InvalidArgumentError: A step, name, metric, note, or the state is wrong. Raised as the errors below if the
                step is older than the newest checkpoint, or if ranks have tensors of different shapes or dtypes under
                one name. Of objects that differ, one rank's is saved; a warning names them once.
            CheckpointExistsError: The run has a checkpoint of this step, see `exist_ok`; or checkpoints that this job
                does not go on from: call `restore` first, or pass `resumed_from` or `start_over`.
            FencedError: A newer job owns the run, or another one has saved since this one restored. Stop this job.
            BucketNotFoundError: There is no such bucket; nothing was uploaded.
            CommitConflictError: Another save of this step was committed meanwhile.
            CommitUnknownError: The store did not say by the deadline whether the commit was carried out.
            SaveTimeoutError: Ranks did not call `save` within `arrival_seconds`, or did not report by the deadline;
                names them, and what each was doing last.
            SaveFailedError: Names the rank, the shard, the attempts and the cause.
        """
        called_seconds = time.monotonic()
        self._require_open()
        self._preemption.forget_expired_notice()
        labels = CheckpointLabels.of(step, name=name, metrics=metrics, overwrite=overwrite, exist_ok=exist_ok)
        noted = checked_user(user or {})
        if wait not in [False, True, "begun"]:
            raise InvalidArgumentError('wait must be False, True or "begun".', wait=wait)
        if self._is_skipped(step, is_awaited=wait is True):
            return False
        operation = self._telemetry.begin("save", self._store, step=step, rank=self._ranks.rank)
        background_save: BackgroundSave | None = None
        try:
            with operation.phase("waiting"):
                self._wait(is_last=self._should_stop)
            if not wait and step <= self._last_step:
                wait = "begun"
            waiting_seconds = time.monotonic() - called_seconds
            seconds = min(self._timeout_seconds - waiting_seconds, self._preemption.working_seconds())
            collective = self._prepare(f"the save of step {step}", seconds=seconds)
            background_save = BackgroundSave(collective, self._ranks, self._saver, before=self._background_saves.newest)
            self._ranks.begin(collective)
            with operation.phase("staging"):
                roles = TensorRoles()
                copied = self._copied(collective, state, roles, stage=wait is not True)
            task = Task(
                labels=labels,
                state=copied,
                planner=self._make_planner(),
                user=noted,
                called_seconds=called_seconds,
                waiting_seconds=waiting_seconds,
                staging_seconds=time.monotonic() - called_seconds - waiting_seconds,
                seconds=seconds,
                operation=operation,
                background=wait is not True,
                begun=background_save.begun,
                roles=roles,
                late=LateCopies() if wait is True else self._stager.late,
                is_awaited=wait == "begun",
                copied_bytes=0 if wait is True else self._stager.copied_bytes,
            )
            self._background_saves.start(background_save, task)
            if wait == "begun":
                self._background_saves.wait_until_begun()
                if self._background_saves.step is None:  # it has ended already
                    self._last_step = step
            elif wait:
                self._background_saves.wait()
                self._last_step = step
            if self._schedule is not None:
                self._schedule.note_saved(step)
        except BaseException as error:
            # Ctrl-C may come anywhere, and a thread may fail to start: the other ranks must be told in each case.
            passes = background_save is not None and self._gives_up(background_save, error, step, wait=wait)
            operation.end(error=error)
            if not passes:
                raise
        else:
            return True
        return False

    @hides_frames
    def restore(
        self,
        state: MutableMapping[str, Any] | nn.Module | Callable[[int], MutableMapping[str, Any] | nn.Module],
        step: int | str | None = None,
        *,
        include: Patterns | None = None,
        exclude: Patterns = (),
        rename: Rename | None = None,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        dtype: Literal["error", "convert"] = "error",
        must_exist: bool = False,
        go_on: bool = True,
    ) -> int | None:
        """Load a checkpoint into a state, in place; called by every rank, at any world size.

        The next save goes on from this checkpoint, and marks newer ones as abandoned; this method warns of that. A
        `restore` of the newest checkpoint before the next save undoes going back. To look at a checkpoint in the middle
        of training, pass `go_on=False` and another state than the one that is trained.

        Tensors are read into the tensors of the state; modules, optimizers, other `Stateful`s and `PerRank` values are
        given theirs; other objects are replaced. A rank of which the checkpoint has no `PerRank` values keeps its own.
        If this method raises, the state may hold parts of the checkpoint and must not be used; after a
        `StateMismatchError` it is unchanged.

        State and checkpoint must have the same names, shapes and dtypes, but for the options, which
        `RemoteLoadPlanner` describes:

            checkpoints.restore(state, exclude="*head.*")  # a resized head, with its optimizer state
            checkpoints.restore(state, missing="keep")     # an added adapter, or a new "epoch": 0

        Costs the store: a HEAD, a GET of the catalog and a GET of the manifest, by the coordinator; a GET per range of
        at most 8 MiB, by one of up to 64 ranks that want it, which gives it to the others over sockets between ranks. A
        rank that gets nothing over its socket reads the range from the store.

        Ranks wait for each other three times: for the choice of the checkpoint, before a byte is read, and before a
        value is applied. Once more after that, if the state of a rank has an object with a `state_dict` or
        `load_state_dict` other than torch's, a module or optimizer with hooks for them, FSDP1, or an optimizer other
        than SGD, Adam and AdamW: it may fail on one rank alone, or call collectives of torch. For this reason also
        before such objects are asked, if the manifest is too large to be sent to all ranks (256 MiB in all). Where a
        function returns the state, twice more.

        Args:
            state: State as for `save`; its keys and shapes say what is loaded. A `Stateful` with a method
                `make_template(names)` is asked by it, in place of `state_dict()`, for the values to load into: `names`
                are those of the checkpoint below it that are to be loaded. Or a function that returns the state, called
                on every rank with the step of the checkpoint that was chosen, and not if there is none.
            step: Step or name of the checkpoint; None, "latest" or "last" is the newest.
            include: Names or patterns to load; None is all. The others stay as they are.
            exclude: Names or patterns that stay as they are.
            rename: Dict of names, or their first parts, in the checkpoint to those in the state; or a function. A
                parameter that a dict renames is also renamed below its optimizers and averages.
            missing: "keep" to keep values that the checkpoint lacks, with a warning; `last_load` has their names.
            unexpected: "ignore" to leave out entries that no rank has a value for, in the same way.
            dtype: "convert" to convert tensors to the dtypes of the state, unless more than precision would be lost.
            must_exist: True to raise where there is no checkpoint, instead of starting from nothing.
            go_on: False to change nothing of the run: the next save goes on from where the job was.

        Returns:
            The step; None if `step` is None and the run has no checkpoint, and then the state is unchanged, and a
            warning says what else lies at the URL, or beside it (two LISTs of a page at most).

        Raises:
            StateMismatchError: The checkpoint does not fit the state; lists all of it, on all ranks. Nothing was read.
            CheckpointNotFoundError: The run has no checkpoint of this step or name; or none, with `must_exist`.
            BucketNotFoundError: There is no such bucket, also without `must_exist`.
            CheckpointGoneError: The checkpoint was deleted while it was being read; the error names newer ones.
            CheckpointExistsError: A checkpoint by itself, and no run, lies at this URL; or `step` is None, and all
                checkpoints of the run are abandoned.
            CorruptCheckpointError: Bytes differ from those that were written: restore an older step.
            UnsafeObjectError: An object needs code to load.
            StorageError: The store failed for five minutes.
            InvalidArgumentError: The step or an option has a wrong value, or matches nothing.
            DcpRemoteError: Another rank failed, fell silent or did not come, and is named; or `timeout_seconds` have
                passed.
        """
        self._require_open()
        if step is not None:
            require_step_or_name(step)
            step = as_step(step)
        options = LoadOptions(
            include=include, exclude=exclude, rename=rename, missing=missing, unexpected=unexpected, dtype=dtype
        )
        self._preemption.forget_expired_notice()
        self.wait()
        collective = self._prepare(
            "the restore" if go_on else "the restore with go_on=False",
            seconds=self._timeout_seconds,
            arrival_seconds=self._arrival_seconds * (1 if self._ranks.has_met else _FIRST_RESTORE_FACTOR),
            failed=DcpRemoteError,
            timed_out=DcpRemoteError,
        )
        made: Any = state
        is_function = _makes_state(state)
        asked = step if isinstance(step, int) else None
        operation = self._telemetry.begin("load", self._store, step=asked, rank=self._ranks.rank)
        try:
            self._ranks.begin(collective)
            # Before the restore, whose outcome may differ between ranks: all ranks must count from the same call.
            self._preemption.agreement.count_restore()
            if self._schedule is not None:
                self._schedule.count_restore()
            is_coordinator = self._ranks.is_coordinator
            with collective, Progress(self._progress, "restore", is_coordinator=is_coordinator) as progress:
                restored = RankRestore(
                    self._ranks,
                    collective,
                    self._store,
                    Request(step, options, must_exist=must_exist, go_on=go_on, starts_over=self._starts_over),
                    operation,
                    progress,
                    self._rank_sockets,
                    allow_pickle=self._allow_pickle,
                    memory_budget_bytes=self._memory_budget_bytes,
                ).load(
                    lambda chosen: as_state(made(chosen) if is_function else made),
                    runs_foreign_code=is_function or runs_foreign_code(as_state(made)),
                    makes_state=is_function,
                )
        except BaseException as error:
            self._ranks.abandon(collective, error)
            if collective.is_unattended:  # ranks that did not come have not counted it
                self._preemption.agreement.forget_restore()
                if self._schedule is not None:
                    self._schedule.agreement.forget_restore()
            operation.end(error=error)
            raise
        self._last_load = restored.report if restored is not None else None
        operation.end(self._last_load)
        if restored is None:
            if not options.given and not is_function:
                self._first_save.note_start(as_state(made))
            return None
        self._first_save.forget_start()
        if go_on:
            self._last_step = restored.report.step
            if restored.baseline is not None:
                self._saver.last = restored.baseline
            self._telemetry.note_restored(restored.report.created)
            if self._coordinator is not None:
                # Another session: a stuck thread may still use this one.
                self._coordinator.job = self._coordinator.job.after(self._last_step, restored.owner)
            if self._schedule is not None:
                self._schedule.note_saved(self._last_step)
        return restored.report.step

    @hides_frames
    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Let saves return while what an optimizer owns is still being copied; its `step` waits for the copies.

        From then on `save` copies the parameters and states of optimizers that were given to this method while
        training goes on, and everything else as before. Costs nothing but at the first step after a save, which waits
        for what is left, and copies along. Of a GPU, the current stream waits, and not the host.

            checkpoints.watch(optimizer)

        Any other change of these tensors between a `save` and the next step of the optimizer, as by `load_state_dict`,
        by averaged weights that are put in for an evaluation, by an optimizer that is not watched, or by a step in a
        CUDA graph, which calls no hooks, needs a call of `before_update` before. Without it, the save fails with a
        `SaveFailedError` that names a tensor: version counters of tensors, and samples of their bytes, are compared
        until the commit (samples on a GPU until the copies have ended). Of a part of a tensor, a change that raises no
        counter is not noticed, and the checkpoint may hold a mix: by way of `.data`, by a fused optimizer that is not
        watched, by another process, or by a kernel that is given raw pointers. Each save fails if a forward pass
        changes weights, as of an `Embedding` with `max_norm`, or if gradients lie in the storage of weights.

        Args:
            optimizer: Optimizer of torch, or one around it, as of accelerate. The manager holds no reference to it, and
                a second call does nothing. For an optimizer that computes gradients in its `step` (a closure, LBFGS)
                the wait comes before them.

        Raises:
            InvalidArgumentError: The object is no optimizer of torch; call `before_update` in its place.
        """
        self._require_open()
        self._updates.watch(optimizer)

    @hides_frames
    def before_update(self) -> None:
        """Return once training may change the state; called before each change of it, as before each optimizer's step.

        For training that changes the state by other means than a `torch.optim.Optimizer`, see `watch`. From the first
        call on, and if no optimizer is watched, `save` copies all of the state while training goes on, except buffers
        of modules that are in the state themselves; every update must then be preceded by this call. A save before the
        first call copies all of the state before it returns. Costs nothing if no save was made since the last call. A
        change without this call is noticed as described at `watch`.
        """
        self._updates.come()

    @hides_frames
    def should_save(self, step: int) -> bool:
        """Return whether to save at this step: by `save_policy`, or because the job is about to be killed.

        Called by every rank after every step, with the same steps; the answer is the same on all ranks. False for the
        step that was saved or restored last, so that a step is saved once however often it is asked about; once the
        error of its save was raised, the step counts as not saved. With `on_error="warn"`, call this once a step: ranks
        hear of a failure at different moments.

            while step < last and not checkpoints.should_stop:
                ...
                if checkpoints.should_save(step):
                    checkpoints.save(step, state)

        SIGTERM is handled as by `reached_preemption`, which need not be called; `should_stop` is true from its step on.

        Costs a lock and no message. With `every_seconds` the ranks agree in the background on a step some heartbeats
        ahead; a rank waits only if it comes to that step within three heartbeats.

        Raises:
            InvalidArgumentError: The manager has no `save_policy`, the step is wrong, or the first call is not made in
                the main thread.
        """
        self._require_open()
        if self._schedule is None:
            raise InvalidArgumentError(
                "This CheckpointManager has no rules by which to save. Pass save_policy=SavePolicy(every_steps=1000).",
                url=self._store.url,
            )
        is_stopping = self.reached_preemption(step)
        return self._schedule.should_save(step, is_last=is_stopping)

    @hides_frames
    def reached_preemption(self, step: int) -> bool:
        """Return whether to save and stop at this step, because the job is about to be killed.

        Called by every rank after every step. SIGTERM reaches ranks at different times, and some ranks never: the ranks
        agree on one step, at which the answer is True on all of them. From the first call on, SIGTERM no longer ends
        the process; a handler that was installed before is called as well. Saves and restores end within
        `notice_seconds` of SIGTERM, less 8 s for the end of the process, or are given up. In a process that lives on
        after that (a minute where no notice is given), the next SIGTERM counts like the first.

            if checkpoints.reached_preemption(step) or step % 1000 == 0:
                checkpoints.save(step, state)
            if checkpoints.should_stop:
                break

        A rank waits for the step for half a minute at most, or a part of the notice, and not for a rank that has left
        or is silent. If the ranks cannot agree, the answer is False, since no save could be committed, and
        `should_stop` is true. Costs nothing as long as there is no signal.
        """
        self._require_open()
        require_step(step)
        self._preemption.install()
        self._should_stop = self._preemption.reached(step)
        return self._should_stop

    # ---- called by any rank

    @property
    def run(self) -> Run:
        """The run as one process sees it: its checkpoints are listed, named, pinned and deleted by this object.

        Methods of the run that write raise `FencedError` once a newer job owns the run. Any rank may call them.
        """
        return self._run

    @property
    def retention_failures(self) -> int:
        """Number of times that `retention` failed, each of which was logged and fails no save; 0 but on rank 0."""
        return self._coordinator.background_deletions.retention_failures if self._coordinator is not None else 0

    @hides_frames
    def wait(self) -> SaveReport | None:
        """Wait until no save is under way; return the report of the last save that was committed.

        Raises:
            DcpRemoteError: The save failed, see `save`. Each failure is raised once; with `on_error="warn"` it is
                logged, and the report is that of an earlier save.
        """
        return self._wait()

    def _wait(self, *, is_last: bool = False) -> SaveReport | None:
        """Wait as `wait` does; before the last save of the job, log the failure of an earlier one and go on."""
        self._require_own_process()
        step = self._background_saves.step
        try:
            report = self._background_saves.wait()
        except BaseException as error:
            # After Ctrl-C the save is still under way, and its step counts as saved.
            if self._schedule is not None and self._background_saves.step is None:
                self._schedule.forget_saved(step)
            if not self._lets_pass(error, step, is_last=is_last):
                raise
            return self.last_save
        if step is not None:
            self._last_step = step
        return report

    @hides_frames
    def close(self) -> None:
        """Wait for the save under way, finish deleting old checkpoints, and release threads and memory.

        A first Ctrl-C logs what this method waits for, and until when; a second one gives the save up. After SIGTERM
        this method returns within `notice_seconds` of the signal. A second call does nothing. Afterwards `save` and
        `restore` are refused; what only reads the run goes on.

        The end of a `with` block closes the manager. If neither has, the process does when it ends, also after an
        error: it waits for the save under way, logs its failure, and then has the exit code 1. Nothing closes the
        manager of a process that a signal or `os._exit` ends: its last save may be missing in the run.

        Raises:
            DcpRemoteError: The last save failed.
        """
        self._close(None)

    # ---- internals

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        if os.getpid() != self._pid:
            return  # a child that was forked has none of the threads, and is no rank
        gives_up = False
        if self._is_last_skipped and self._ranks.is_coordinator:
            logger.warning("%s: the last save of this job was left out; pass wait=True in it", self._store.url)
        try:
            self._background_saves.close(error)
            if error is None and self._passed is not None and self._passed[1] is self.last_save:
                raise self._passed[0]
        except KeyboardInterrupt:
            gives_up = True
            raise
        finally:
            self._telemetry.close()
            self._updates.close()
            self._stager.close()
            # Half of what is left of the notice: the process still has to end afterwards.
            seconds = 0.0 if gives_up else self._preemption.remaining_seconds()
            limit_exit_wait(0.0 if math.isfinite(seconds) else math.inf)
            self._preemption.close()
            if self._schedule is not None:
                self._schedule.close()
            self._ranks.close(seconds / 2, is_missed=error is not None)

    def _is_skipped(self, step: int, *, is_awaited: bool) -> bool:
        """Return whether a save is left out because another is under way on the coordinator, which decides."""
        self._is_last_skipped = self._when_busy == "skip" and self._ranks.ask_coordinator(
            f"skip {step}",
            lambda: self._background_saves.is_busy and not (is_awaited or self.should_stop),
            seconds=self._arrival_seconds,
            left_seconds=self._preemption.working_seconds,
        )
        self.skipped_saves += self._is_last_skipped
        if self._is_last_skipped and self.skipped_saves == 1 and self._ranks.is_coordinator:
            text = "%s: the save of step %d is left out, since another is under way; skipped_saves counts more of them"
            logger.warning(text, self._store.url, step)
        return self._is_last_skipped

    def _lets_pass(self, error: BaseException, step: int | None, *, is_last: bool = False) -> bool:
        """Return whether this rank goes on without a save that failed; count and log the failure then."""
        if not (is_last or self._on_error == "warn") or not may_pass(error):
            return False
        for each in (error, error.__cause__, error.__context__):
            if each is not None:
                each.__traceback__ = None  # whose frames hold the state
        self.failed_saves, self._passed = self.failed_saves + 1, (error, self.last_save)
        text = "%s: training goes on without step %s, whose save has failed; failed_saves=%d: %s"
        level = logging.WARNING if self._ranks.is_coordinator else logging.INFO
        logger.log(level, text, self._store.url, step, self.failed_saves, error)
        return True

    def _gives_up(self, background_save: BackgroundSave, error: BaseException, step: int, *, wait: object) -> bool:
        """Give up a save whose call raises; return whether the job goes on, since not the call has failed."""
        passes = background_save.has_raised(error) and wait is not True and self._lets_pass(error, step)
        self._background_saves.abandon(background_save, error)
        self._stager.cancel()
        return passes

    def _copied(
        self,
        collective: Collective,
        state: Mapping[str, Any] | nn.Module | Callable[[], Mapping[str, Any] | nn.Module],
        roles: TensorRoles,
        *,
        stage: bool,
    ) -> FlatState:
        made: Any = state
        if _makes_state(made):
            # Not before all ranks have come: collectives of torch in this function would wait for an absent rank.
            collective.gather(None, lambda given: require_one_kind(is_one_kind=not any(given)))
            collective.set_activity("collecting the state")
            made = made()
        copied = build_saved_state(as_state(made), self._ranks.rank, roles)
        self._first_save.check(as_state(made), copied, is_coordinator=self._ranks.is_coordinator)
        if not stage:
            # In the caller's thread, because streams are per thread: the saving thread would wait for another stream.
            wait_for_devices(tensor.device for tensor in tensors_of(copied.values))
            return copied
        collective.set_activity("copying the state")
        staged = self._stager.stage(copied.values, lambda held: self._updates.choose(copied, held, roles))
        return copied._replace(values=staged)

    def _make_planner(self) -> RunPlanner:
        """Return the planner of one save; an import overrides this method with a planner that reads its source."""
        return RunPlanner()

    def _prepare(
        self,
        what: str,
        *,
        seconds: float,
        arrival_seconds: float | None = None,
        failed: type[DcpRemoteError] = SaveFailedError,
        timed_out: type[DcpRemoteError] = SaveTimeoutError,
    ) -> Collective:
        if self._is_alone and _has_group() and dist.get_world_size() > 1:
            raise InvalidArgumentError(
                "This CheckpointManager was made before torch.distributed was initialized, and knows of no other rank. "
                "Make it after init_process_group.",
                url=self._store.url,
            )
        terms = Terms(
            failed,
            timed_out,
            seconds=seconds,
            silence_seconds=self._silence_seconds,
            arrival_seconds=self._arrival_seconds if arrival_seconds is None else arrival_seconds,
            left_seconds=self._preemption.working_seconds,
        )
        return self._ranks.prepare(what, terms)

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("This CheckpointManager is closed; make another one.", url=self._store.url)
        self._require_own_process()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgumentError(
                "This process was forked from the one that made this CheckpointManager, as a DataLoader's worker is. "
                "Its saves would take the place of the other's: save and restore there.",
                url=self._store.url,
                pid=os.getpid(),
                made_by_pid=self._pid,
            )


def _makes_state(state: object) -> bool:
    """Return whether a function is given in place of a state; a module is callable, too."""
    return callable(state) and not isinstance(state, Mapping) and not hasattr(state, "state_dict")


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
