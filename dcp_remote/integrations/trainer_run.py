"""Checkpoints of one Trainer in a run: what is saved, from what training resumes, and how it is restored."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from transformers import TrainerCallback

from dcp_remote import CheckpointManager, Files, ModelState, Opaque, RandomStates, is_remote
from dcp_remote.errors import CheckpointNotFoundError, InvalidArgumentError, StateMismatchError
from dcp_remote.integrations import runs
from dcp_remote.integrations.adapters import AdapterState, is_peft
from dcp_remote.integrations.entries import ENGINE_KEY, keep_only, leave_out
from dcp_remote.integrations.trainer_files import STATE_FILE, write_files
from dcp_remote.integrations.trainer_retention import metrics_of
from dcp_remote.integrations.wrappers import training_parts, unwrap_optimizer

logger = logging.getLogger(__name__)

# Entries of a checkpoint beside those of `training_state`.
FILES_KEY = "files"
ABOUT_KEY = "trainer"

# Beginning of the name of a trainer's temporary folder.
FOLDER_PREFIX = "dcp_remote-trainer-"

# Settings of the manager that are about saving, and do not apply to another run that is only read.
_SAVING_SETTINGS = frozenset({"retention", "resumed_from", "start_over", "save_policy", "notice_seconds"})


# Packages whose code changes no weights between a save and the next step of the optimizer, and the events there.
_OWN_PACKAGES = frozenset({"abc", "builtins", "torch", "transformers", "peft", "dcp_remote"})
_EVENTS_BEFORE_STEP = (
    *("on_save", "on_epoch_end", "on_epoch_begin", "on_step_begin", "on_substep_end"),
    *("on_pre_optimizer_step", "on_evaluate", "on_prediction_step", "on_train_end"),
)

# Texts that stand for a truth value: `--resume_from_checkpoint` of Transformers' programs is a text.
_TRUTH_VALUES = {"true": True, "false": False}

# Arguments that the user of a Trainer can pass, for the advice of errors.
WORDS = {
    "restore": "train(resume_from_checkpoint=True) goes on from the newest checkpoint",
    "start_over": "start_over=True of remote(), once, leaves the checkpoints behind",
    "exclude": "load_weights(model, url, exclude=…) takes the weights that fit into a changed model, for a new "
    "training in another run",
    "replicas": "replicas='coordinator' of remote() saves those of the lowest rank",
    "before_update": "overlap=False of remote() copies all before a save returns",
}


# Managers that watch an optimizer, perhaps of an earlier trainer: each of their saves returns before it has copied.
_overlapped: WeakKeyDictionary[CheckpointManager, str] = WeakKeyDictionary()  # with the URL of the run


class HeldRandomStates(RandomStates):
    """Random states of this rank; a restore keeps them until `Trainer` has skipped the batches that were seen."""

    _loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep states for `apply`."""
        self._loaded = state_dict

    def apply(self) -> None:
        """Set the states that were loaded; keep those that are, with a log line, if there are none."""
        if self._loaded is None:
            logger.info("no random states of this rank were saved: its draws are not those that would have followed")
        else:
            super().load_state_dict(self._loaded)


@dataclass(eq=False, repr=False)  # settings may hold secrets
class RemoteRun:
    """Checkpoints of one trainer: saves and restores them, and holds what a restore has read.

    Attributes:
        url: URL of the run.
        settings: Keyword arguments of the manager.
        saves_only_model: True to save models alone.
        saves_frozen_base: True to save the frozen base of a PEFT model.
        resumes: True to resume from the newest checkpoint unless `train` is told otherwise.
        overlaps: True if saves return while the state is being copied; None if only where `_is_own_code` allows it.
        folder: Temporary folder of this rank, removed when the process ends; the files of one checkpoint at a time.
        random: Random states of this rank.
        best_url: URL of the best checkpoint so far, as read from the resumed checkpoint; None if there is none.
        is_collecting: True while the state of a checkpoint is collected.
    """

    url: str
    settings: Mapping[str, Any]
    saves_only_model: bool
    saves_frozen_base: bool
    resumes: bool
    overlaps: bool | None

    def __post_init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.random = HeldRandomStates()
        self.best_url: str | None = None
        self.is_collecting = False
        self._read_from: tuple[CheckpointManager, int] | None = None
        self._read_entries: frozenset[str] = frozenset()
        self._has_saved = False

    @property
    def manager(self) -> CheckpointManager:
        """Manager of the run; made when first asked for, after the process group."""
        return runs.manager_of(self.url, **self.settings)

    def is_own(self, folder: str | None) -> bool:
        """Return whether a folder of a checkpoint stands for one in object storage."""
        return folder is not None and Path(folder).is_relative_to(self.folder)

    def has_url(self, url: str | None) -> bool:
        """Return whether a URL is that of a checkpoint of this run."""
        return url is not None and url.startswith(f"{self.url}/")

    # ---- saving

    def save(self, trainer: Any, write_own_files: Callable[[], None]) -> None:
        """Save a checkpoint; what fails on one rank before it was copied is raised on all."""
        step: int = trainer.state.global_step
        if trainer.state.best_global_step == step:
            trainer.state.best_model_checkpoint = f"{self.url}/checkpoint-{step}"
        # Not left out with when_busy="skip": the checkpoint that is loaded in the end, and the last one.
        is_needed = trainer.state.best_global_step == step or trainer.control.should_training_stop
        if is_needed and self.settings.get("when_busy") == "skip":
            self.manager.wait()  # so that no save is under way, for which this one would be left out
        overlaps = _can_overlap(trainer) and (_is_own_code(trainer) if self.overlaps is None else self.overlaps)
        # Trainer may save a step twice, as at the end of an epoch: those are one checkpoint.
        runs.save_step(
            self.url,
            step,
            lambda: self._collect(trainer, step, write_own_files),
            settings=self.settings,
            owners={"trainer": trainer},
            watched=[unwrap_optimizer(trainer.optimizer)] if overlaps else [],
            name=f"checkpoint-{step}",
            metrics=metrics_of(trainer.state),
        )
        if overlaps:
            _overlapped[self.manager] = self.url
        else:
            self.end_copies()
        self._has_saved = True
        # A collective of torch, which would wait for ever for a rank that does not come to the save.
        trainer.store_flos()

    def end_copies(self) -> None:
        """Wait for the copies of the last save: other code than the optimizer's step may change the state now."""
        for manager in [one for one, url in _overlapped.items() if url == self.url]:  # without opening another
            manager.before_update()

    def _collect(self, trainer: Any, step: int, write_own_files: Callable[[], None]) -> dict[str, Any]:
        folder = self.folder / f"checkpoint-{step}"
        shutil.rmtree(folder, ignore_errors=True)  # of a save that failed
        folder.mkdir()
        state = trainer.state
        best = state.best_global_step, state.best_model_checkpoint
        # With a best step Trainer waits in a collective of torch, in which a rank would wait for one that has failed.
        state.best_global_step = None
        self.is_collecting = True
        try:
            write_own_files()
        finally:
            self.is_collecting = False
            state.best_global_step, state.best_model_checkpoint = best
        training = self._training(trainer, is_model_alone=self.saves_only_model)
        # Of an object that several ranks give, any rank's may be stored: of these, whose values differ, one rank's.
        own: dict[str, Any] = {}
        if trainer.args.process_index == 0:
            # The sum over ranks follows the save: in the file every rank counts as much as this one.
            flos, state.total_flos = state.total_flos, state.total_flos + trainer.current_flos * trainer.args.world_size
            try:
                write_files(trainer, folder)
            finally:
                state.total_flos = flos
            own[FILES_KEY] = Files.read(folder)
            own[ABOUT_KEY] = Opaque(
                {
                    "entries": sorted(training),
                    "world_size": trainer.args.world_size,
                    "global_batch": _global_batch(trainer),
                    "transformers": transformers.__version__,
                }
            )
        shutil.rmtree(folder, ignore_errors=True)
        return training | own

    def _training(self, trainer: Any, *, is_model_alone: bool) -> dict[str, Any]:
        """Return the state of model, optimizer, scheduler, scaler and random states; the same to save and to load."""
        is_adapter = is_peft(trainer.model)
        is_part = is_adapter and not self.saves_frozen_base
        engine: dict[str, Any] = {}
        if trainer.is_deepspeed_enabled:
            from dcp_remote.integrations.deepspeed import engine_state

            engine = engine_state(trainer.model_wrapped, exclude_frozen_parameters=is_part, is_strict=not is_adapter)
        own = AdapterState if is_part else ModelState
        model = {"model": engine["model"] if engine else own(trainer.model)}
        if is_model_alone:
            return model
        state = training_parts(
            engine,
            models=[trainer.model],
            optimizers=[unwrap_optimizer(trainer.optimizer)],
            # The engine does not know a scheduler that Trainer has made.
            schedulers=[] if "scheduler" in engine else [trainer.lr_scheduler],
            scaler=getattr(trainer.accelerator, "scaler", None),
            random_states=self.random,
        )
        return state | model

    # ---- loading

    @contextmanager
    def resume(self, trainer: Any, resume_from: Any) -> Iterator[Any]:
        """Give `Trainer.train` what to resume from: the folder of a checkpoint, filled with its small files, or None.

        Raises:
            InvalidArgumentError: The run has checkpoints, from which this training does not go on; or the checkpoint is
                not one of a trainer.
            CheckpointNotFoundError: The checkpoint that was asked for does not exist.
        """
        resume_from = _TRUTH_VALUES.get(str(resume_from).lower(), resume_from)
        self.best_url, self._read_from = None, None
        self.random = HeldRandomStates()
        is_local = not self.has_url(f"{resume_from}/") and _is_local(resume_from)
        can_resume = self.resumes and not self._has_saved and (resume_from is None or is_local)
        # Asked once: each restore of an empty run logs a warning.
        is_empty = can_resume and is_local and self._find_newest() is None
        if can_resume and not is_empty:
            if is_local:
                logger.warning("%s has checkpoints: resuming from the newest, not from %s", self.url, resume_from)
            resume_from, is_local = True, False
        is_asked = resume_from is not None and resume_from is not False
        if not is_asked or is_local:
            if not is_empty:
                self._require_start(trainer)
            yield resume_from or None
            return
        manager, checkpoint = self._locate(resume_from)
        files, about = Files(), Opaque[Any](None)
        try:
            step = manager.restore(
                {FILES_KEY: files, ABOUT_KEY: about},
                checkpoint,
                rename=keep_only((FILES_KEY, ABOUT_KEY)),
                go_on=False,
                must_exist=resume_from is not True,
            )
        except StateMismatchError as error:
            raise InvalidArgumentError(
                "This checkpoint was not saved by a Trainer: training cannot resume from it. Load its weights by "
                "dcp_remote.integrations.transformers.load_weights(model, url), and train from the beginning.",
                url=manager.url,
                checkpoint=checkpoint,
            ) from error
        if manager is not self.manager:
            self._require_start(trainer)
        if step is None:
            yield None
            return
        self._read_from, self._read_entries = (manager, step), frozenset(about.value["entries"])
        _warn_of_batches(trainer, about.value, manager.url, step)
        folder = self.folder / "resumed" / f"checkpoint-{step}"
        try:
            self._write_resumed(files, folder)
            yield str(folder)
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)

    def _write_resumed(self, files: Files, folder: Path) -> None:
        state = json.loads(files[STATE_FILE])
        self.best_url, state["best_model_checkpoint"] = state["best_model_checkpoint"], None
        Files({**{name: files[name] for name in files}, STATE_FILE: json.dumps(state).encode()}).write(folder)

    def restore(self, trainer: Any) -> None:
        """Read the tensors of the checkpoint that is being resumed into model and optimizer, in place; collective."""
        assert self._read_from is not None, "resume comes first"
        manager, step = self._read_from
        # Also with `save_only_model`, which says what is saved.
        state = self._training(trainer, is_model_alone=False)
        lacking = sorted(state.keys() - self._read_entries)
        for key in lacking:
            del state[key]
        if {*lacking} - {ENGINE_KEY}:
            logger.warning("%s: step %d was saved without %s: they start anew", manager.url, step, ", ".join(lacking))
        rename, is_own = leave_out(state, FILES_KEY, ABOUT_KEY), manager is self.manager
        # Ignored are such as the scaler of a training in fp16, which goes on in another precision: a warning names it.
        runs.restore_existing(manager, state, step, rename=rename, unexpected="ignore", go_on=is_own)
        if is_own:
            runs.note_step(self.url, step, trainer=trainer)

    def load_best(self, trainer: Any) -> None:
        """Read the weights of the best checkpoint into the model; the run goes on from where it was."""
        url: str = trainer.state.best_model_checkpoint
        manager = self.manager if self.has_url(url) else self._manager_of(runs.split_path(url).run_url)
        name = url.rpartition("/")[2]
        logger.info("%s: loading the best model from %s (score: %s)", manager.url, name, trainer.state.best_metric)
        try:
            runs.restore_existing(manager, self._training(trainer, is_model_alone=True), name, go_on=False)
        except CheckpointNotFoundError:
            if self.settings.get("on_error") != "warn":
                raise
            # Its save has failed, here or in the job from which this one was resumed.
            logger.warning("%s: there is no %s; the model stays as it was trained last", manager.url, name)

    def _locate(self, resume_from: Any) -> tuple[CheckpointManager, str | int | None]:
        """Return the manager of the run to resume from, and the step or name of the checkpoint; None is the newest."""
        text = str(resume_from).rstrip("/")
        if resume_from is True or text == self.url:
            return self.manager, None
        name = text.removeprefix(f"{self.url}/")
        if "/" not in name:
            return self.manager, int(name) if name.isdecimal() else name
        runs.wait_for_saves()
        path = runs.find_checkpoint(text, **runs.storage_of(self.settings))
        return self._manager_of(path.run_url), path.checkpoint

    def _manager_of(self, url: str) -> CheckpointManager:
        return runs.manager_of(url, **{name: self.settings[name] for name in self.settings.keys() - _SAVING_SETTINGS})

    def _find_newest(self) -> int | None:
        """Return the step of the run's newest checkpoint; -1 if it is another framework's, None if there is none."""
        try:
            return self.manager.restore({ABOUT_KEY: Opaque(None)}, rename=keep_only((ABOUT_KEY,)), go_on=False)
        except StateMismatchError:
            return -1

    def _require_start(self, trainer: Any) -> None:
        """Refuse to train from elsewhere where the run has checkpoints: its first save would fail."""
        declares = self.settings.get("start_over") or self.settings.get("resumed_from") is not None
        if trainer.args.save_strategy == "no" or (declares and not self._has_saved):
            return
        found = self._find_newest()
        if found is not None:
            raise InvalidArgumentError(
                "This run has checkpoints already. Pass resume_from_checkpoint=True to go on from the newest; or "
                "start_over=True to remote(), once, to leave them behind; or use another URL.",
                url=self.url,
                newest=found if found >= 0 else None,
            )


def _can_overlap(trainer: Any) -> bool:
    """Return whether the optimizer's `step` alone changes what it owns.

    FSDP1 replaces and writes back the memory of parameters in other places, engines of DeepSpeed update parameters by
    themselves, and a training that begins again with a smaller batch has another optimizer.
    """
    is_fsdp1 = any(type(module).__name__ == "FullyShardedDataParallel" for module in trainer.model_wrapped.modules())
    is_other = is_fsdp1 or trainer.is_deepspeed_enabled or trainer.args.auto_find_batch_size
    return runs.is_torchs(unwrap_optimizer(trainer.optimizer)) and not is_other


def _is_own_code(trainer: Any) -> bool:
    """Return whether all that runs between a save and the next step of the optimizer is code of Transformers.

    Users' code may change weights there: averages that are put in for an evaluation, adversarial perturbations, a
    callback that merges adapters. So may the forward pass of an `Embedding` with `max_norm`, and of constrained OFT.
    """
    modules = list(trainer.model.modules())
    if any(getattr(one, "max_norm", None) is not None or getattr(one, "coft", False) for one in modules):
        return False
    kinds = {type(trainer), *map(type, modules)}
    for kind in map(type, trainer.callback_handler.callbacks):
        if any(getattr(kind, name) is not getattr(TrainerCallback, name) for name in _EVENTS_BEFORE_STEP):
            kinds.add(kind)
    bases = {base for kind in kinds for base in kind.__mro__}
    return all(base.__module__.partition(".")[0] in _OWN_PACKAGES for base in bases)


def _global_batch(trainer: Any) -> int:
    """Return the number of samples of one step over all ranks."""
    arguments = trainer.args
    return int(trainer._train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size)


def _warn_of_batches(trainer: Any, about: Mapping[str, Any], url: str, step: int) -> None:
    saved, here = about["global_batch"], _global_batch(trainer)
    if saved != here and not trainer.args.ignore_data_skip:
        logger.warning(
            "%s: step %d was trained with %d samples a step, and this job has %d. Trainer finds its place in the data "
            "by the number of steps: samples are repeated or left out. Keep %d by per_device_train_batch_size or "
            "gradient_accumulation_steps.",
            *(url, step, saved, here, saved),
        )


def _is_local(resume_from: Any) -> bool:
    """Return whether this is a local folder, whose checkpoint `Trainer` loads itself."""
    return isinstance(resume_from, str | os.PathLike) and not is_remote(resume_from) and Path(resume_from).is_dir()
