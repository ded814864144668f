"""Trainer of Transformers: checkpoints in object storage instead of local folders.

    trainer = remote(Trainer(...), "s3://bucket/run")
    trainer.train(resume_from_checkpoint=True)

`remote` changes the class of a trainer to a subclass of its own class. Importing this module makes `Trainer` refuse a
URL as `output_dir`, of which it would make a local folder.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import transformers
import transformers.trainer as trainer_module
from torch import nn
from transformers import Trainer, TrainerCallback

from dcp_remote import (
    CheckpointInfo,
    CheckpointManager,
    Files,
    ModelState,
    Opaque,
    PerRank,
    RandomStates,
    is_remote,
    training_state,
)
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.runs import find_checkpoint, manager_of, split_path, wait_for_saves

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)

TrainerT = TypeVar("TrainerT")

# Entries of a checkpoint beside those of `training_state`.
FILES_KEY = "files"
ABOUT_KEY = "trainer"

# Metric of each checkpoint by which retention knows the step of the best model.
BEST_STEP_METRIC = "best_global_step"

_STATE_FILE = "trainer_state.json"
_ARGUMENTS_FILE = "training_args.json"
# Written around a checkpoint by Trainer's own handler of SIGTERM.
_LEFT_OUT_FILES = frozenset({"checkpoint-is-incomplete.txt"})

# Beginning of the name of a trainer's temporary folder.
_FOLDER_PREFIX = "dcp_remote-trainer-"

# Modules by which `torch.compile` and activation checkpointing wrap others, left out of names.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

# Settings of the manager that are about saving, and do not apply to another run that is only read.
_SAVING_SETTINGS = frozenset({"retention", "resumed_from", "start_over", "save_policy", "notice_seconds"})


def remote(
    trainer: TrainerT,
    url: str,
    *,
    resume: bool = False,
    save_only_model: bool | None = None,
    save_frozen_base: bool = False,
    **settings: Any,
) -> TrainerT:
    """Make a trainer save its checkpoints to a run in object storage, and resume from there; return the same trainer.

        trainer = remote(Trainer(model=model, args=args, train_dataset=data), "s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    Every rank calls this. A checkpoint is one commit of model, optimizer, scheduler, scaler, the random states of each
    rank, and the small files that `Trainer` writes beside them (trainer state with that of callbacks, configurations,
    tokenizer, training arguments as JSON). Its step is `global_step`, its name `checkpoint-<step>`. Tensors are written
    and read by each rank by itself, whatever the trainer is wrapped in, and are never gathered.

    `train(resume_from_checkpoint=…)` takes True (the newest checkpoint of the run; from the beginning, with a warning,
    if there is none), the URL of a run, the URL or name of a checkpoint, or a local folder, which is `Trainer`'s own
    affair. Without it, and without `start_over=True`, a run that has checkpoints is refused. `train` returns when the
    last checkpoint is committed.

    `args.save_total_limit` is the retention: the newest checkpoint and that of the best model always stay.
    `args.load_best_model_at_end` reads the best model from the run. With `notice_seconds`, SIGTERM makes all ranks save
    and stop at the same step.

    Args:
        trainer: `transformers.Trainer`, or an instance of a subclass whose `_save_checkpoint` calls that of its base.
        url: URL of the run, as for `CheckpointManager`.
        resume: True to resume from the newest checkpoint where `train` is not told from which, for programs that do not
            pass `resume_from_checkpoint`.
        save_only_model: True to save no optimizer, scheduler and random states; None is `args.save_only_model`.
        save_frozen_base: True to save the frozen parameters of a PEFT model as well, so that the checkpoint can be
            loaded without the base model; they are sent once. False saves adapters and what is trained.
        settings: Keyword arguments of `CheckpointManager`, such as `storage_options`.

    Raises:
        InvalidArgumentError: The trainer is of another kind, has a URL as `output_dir`, pushes checkpoints to the Hub,
            runs on XLA or SageMaker, or has both `save_total_limit` and `retention`.
    """
    subject: Any = trainer
    if not isinstance(subject, Trainer):
        raise InvalidArgumentError("remote takes a transformers.Trainer.", type=type(trainer).__qualname__)
    if isinstance(subject, RemoteCheckpointMixin):
        if subject._remote.url != url.rstrip("/"):
            raise InvalidArgumentError("This trainer saves to another run already.", url=url, other=subject._remote.url)
        return trainer
    _require_supported(subject)
    subject._remote = _RemoteRun(
        url.rstrip("/"),
        _with_retention(subject.args.save_total_limit, settings),
        saves_only_model=subject.args.save_only_model if save_only_model is None else save_only_model,
        saves_frozen_base=save_frozen_base,
        resumes=resume,
    )
    subject.add_callback(_RemoteCallback(subject._remote))
    own: Any = type(subject)
    subject.__class__ = _remote_class(own)
    return trainer


def enable(url: str, **settings: Any) -> None:
    """Make every `Trainer` that is made from now on save its checkpoints to a run, as `remote` does.

    For programs that make their trainer out of sight. Every rank calls this, before the trainer is made.

    Args:
        url: URL of the run.
        settings: Keyword arguments of `remote`.

    Raises:
        InvalidArgumentError: Another run, or other settings, are enabled already.
    """
    global _enabled  # noqa: PLW0603  # read when a trainer is made
    if _enabled not in (None, (url, settings)):
        raise InvalidArgumentError("Another run is enabled already. A program has one.", url=url, other=_enabled[0])
    _enabled = (url, settings)


def load_weights(model: nn.Module, url: str, *, storage_options: Mapping[str, object] | None = None) -> int:
    """Load the weights of a checkpoint into a model, in place; called by every rank. Returns the step.

    The checkpoint may be another framework's: names are canonical, and dtypes are converted. Weights of the model that
    the checkpoint lacks stay as they are, such as a frozen base below adapters; the log names the first of them.

    Args:
        model: Model, plain or wrapped (DDP, FSDP, PEFT).
        url: URL of a run, for its newest checkpoint, or of a checkpoint in a run: `s3://bucket/run/checkpoint-500`.
        storage_options: Options of the store.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        StateMismatchError: No weight of the model is in the checkpoint, or shapes differ.
    """
    options: dict[str, Any] = {} if storage_options is None else {"storage_options": storage_options}
    wait_for_saves()
    path = find_checkpoint(url, **options)
    # A manager of its own: a trainer may open the run afterwards, with its settings.
    with CheckpointManager(path.run_url, **options) as manager:
        step = manager.restore(
            {"model": ModelState(model)},
            path.checkpoint,
            missing="keep",
            unexpected="ignore",
            dtype="convert",
            go_on=False,
            must_exist=True,
        )
    assert step is not None
    return step


@dataclass(frozen=True, slots=True)
class KeepLatest:
    """Retention of `save_total_limit`: the newest checkpoints, among them that of the best model.

    Attributes:
        count: Number of checkpoints to keep; two at least where the best is not the newest.
    """

    count: int

    def __call__(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return the steps to delete."""
        steps = [info.step for info in checkpoints]
        best = dict(checkpoints[-1].metrics).get(BEST_STEP_METRIC)
        kept = {steps[-1]} | ({int(best)} & set(steps) if best is not None else set())
        free = max(self.count - len(kept), 0)
        others = [step for step in steps if step not in kept]
        return others[: len(others) - free]


class RemoteCheckpointMixin(_Base):  # type: ignore[misc]  # Transformers may not be installed
    """Methods of a trainer that `remote` has changed; they come before those of the trainer's own class.

    Code of `Trainer` and of the trainer's class still runs around a checkpoint: what it writes goes to a temporary
    folder, and from there into the checkpoint. Weights, optimizer and random states never lie there.
    """

    _remote: _RemoteRun

    # ---- saving

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the temporary folder: no checkpoint is written, listed or deleted in `output_dir`."""
        return str(self._remote.folder)

    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint in the background; collective."""

        def write_files() -> None:
            super(RemoteCheckpointMixin, self)._save_checkpoint(model, trial, *args, **kwargs)

        self._remote.save(self, write_files)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002  # Trainer's signature
        """Write the model to a local folder, as `Trainer` does; nothing as a part of a checkpoint."""
        if is_remote(output_dir):
            raise InvalidArgumentError(
                "save_model writes to a local folder. Checkpoints go to the run by themselves; "
                "upload the exported model by other means.",
                output_dir=output_dir,
            )
        if not self._remote.is_own(output_dir):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write nothing for a remote checkpoint."""
        if not self._remote.is_own(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        """Write nothing for a remote checkpoint."""
        if not self._remote.is_own(output_dir):
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing for a remote checkpoint."""
        if not self._remote.is_own(output_dir):
            super()._save_rng_state(output_dir)

    def store_flos(self) -> None:
        """Add up the operations of all ranks, by a collective of torch; not inside of a save, where a rank may fail."""
        if not self._remote.is_collecting:
            super().store_flos()

    # ---- loading

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint in object storage if that is asked; wait for the last checkpoint. See `remote`."""
        if self.hp_search_backend is not None or kwargs.get("trial") is not None or (args and args[0] is not None):
            raise InvalidArgumentError(
                "A run holds one training, and a search for hyperparameters makes several. Make a trainer for each.",
                url=self._remote.url,
            )
        with self._remote.resume(self, resume_from_checkpoint) as folder:
            output = super().train(folder, *args, **kwargs)
        self._remote.manager.wait()
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing yet for a remote checkpoint: model and optimizer are read together."""
        if not self._remote.is_own(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read model, optimizer and scheduler of a remote checkpoint into those of this trainer."""
        if self._remote.is_own(checkpoint):
            self._remote.restore(self)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing for a remote checkpoint: the scaler was read with the optimizer."""
        if not self._remote.is_own(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states that were read from a remote checkpoint."""
        if self._remote.is_own(checkpoint):
            self._remote.random.apply()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        """Read the weights of the best checkpoint from the run."""
        if is_remote(self.state.best_model_checkpoint) or self._remote.has_url(self.state.best_model_checkpoint):
            self._remote.load_best(self)
        else:
            super()._load_best_model()


class _RemoteCallback(TrainerCallback):  # type: ignore[misc]  # Transformers may not be installed
    """Part of a remote trainer at moments that no method of `Trainer` marks in all versions."""

    def __init__(self, run: _RemoteRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back the URL of the best checkpoint, which `Trainer` would take for a folder that was deleted."""
        if self._run.best_url is not None:
            state.best_model_checkpoint = self._run.best_url

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and stop, at one step on all ranks, after SIGTERM."""
        if self._run.stops_on_notice and self._run.manager.reached_preemption(state.global_step):
            control.should_save = control.should_training_stop = True
        return control


class _HeldRandomStates:
    """Random states of this rank; a restore keeps them until `Trainer` has skipped the batches that were seen."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return RandomStates().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loaded = state_dict

    def apply(self) -> None:
        """Set the states that were loaded; keep those that are, with a log line, if there are none."""
        if self._loaded is None:
            logger.info("no random states of this rank were saved: its draws are not those that would have followed")
        else:
            RandomStates().load_state_dict(self._loaded)


class _AdapterState(ModelState):
    """State of a PEFT model without its frozen base: adapters, trained parameters and buffers."""

    def state_dict(self) -> dict[str, Any]:
        left_out = self._base_names()
        return {name: value for name, value in super().state_dict().items() if name not in left_out}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        missing = self.state_dict().keys() - state_dict.keys()
        if missing:
            raise StateMismatchError("The state of an adapter lacks values.", names=", ".join(sorted(missing)[:5]))
        # In place of the values that were read, which share memory with the model.
        self.model.load_state_dict(state_dict, strict=False)

    def _base_names(self) -> set[str]:
        """Return the names of frozen parameters that are no part of an adapter, without those of wrappers."""
        prefixes = _adapter_prefixes(self.model)
        names = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            parts = [part for part in name.split(".") if part not in _WRAPPERS]
            if not parameter.requires_grad and not any(part.startswith(prefixes) for part in parts):
                names.add(".".join(parts))
        return names


class _RemoteRun:
    """Checkpoints of one trainer: saves and restores them, and holds what a restore has read.

    Args:
        url: URL of the run.
        settings: Keyword arguments of the manager.
        saves_only_model: True to save models alone.
        saves_frozen_base: True to save the frozen base of a PEFT model.
        resumes: True to resume from the newest checkpoint unless `train` is told otherwise.

    Attributes:
        url: URL of the run.
        folder: Temporary folder of this rank, removed with this object; the files of one checkpoint at a time.
        random: Random states of this rank.
        best_url: URL of the best checkpoint so far, as read from the resumed checkpoint; None if there is none.
        is_collecting: True while the state of a checkpoint is collected.
    """

    def __init__(
        self,
        url: str,
        settings: Mapping[str, Any],
        *,
        saves_only_model: bool,
        saves_frozen_base: bool,
        resumes: bool,
    ) -> None:
        self.url = url
        self._resumes = resumes
        self._settings = settings
        self._saves_only_model, self._saves_frozen_base = saves_only_model, saves_frozen_base
        self._temporary = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX)
        self.folder = Path(self._temporary.name)
        self.random = _HeldRandomStates()
        self.best_url: str | None = None
        self.is_collecting = False
        self._read_from: tuple[CheckpointManager, int] | None = None
        self._read_entries: frozenset[str] = frozenset()
        self._saved_step: int | None = None
        self._has_saved = False

    @property
    def manager(self) -> CheckpointManager:
        """Manager of the run; made when first asked for, after the process group."""
        return manager_of(self.url, **self._settings)

    @property
    def stops_on_notice(self) -> bool:
        """True if SIGTERM makes the ranks save and stop."""
        return self._settings.get("notice_seconds") is not None

    def is_own(self, folder: str | None) -> bool:
        """Return whether a folder of a checkpoint stands for one in object storage."""
        return folder is not None and Path(folder).is_relative_to(self.folder)

    def has_url(self, url: str | None) -> bool:
        """Return whether a URL is that of a checkpoint of this run."""
        return url is not None and url.startswith(f"{self.url}/")

    # ---- saving

    def save(self, trainer: Any, write_files: Callable[[], None]) -> None:
        """Save a checkpoint; what fails on one rank before it was copied is raised on all."""
        step: int = trainer.state.global_step
        if trainer.state.best_global_step == step:
            trainer.state.best_model_checkpoint = f"{self.url}/checkpoint-{step}"
        trainer.store_flos()
        self.manager.save(
            step,
            lambda: self._collect(trainer, step, write_files),
            name=f"checkpoint-{step}",
            metrics=_metrics_of(trainer.state),
            # Trainer may save a step twice, as at the end of an epoch: those are one checkpoint.
            exist_ok=step == self._saved_step,
        )
        self._saved_step, self._has_saved = step, True

    def _collect(self, trainer: Any, step: int, write_files: Callable[[], None]) -> dict[str, Any]:
        folder = self.folder / f"checkpoint-{step}"
        shutil.rmtree(folder, ignore_errors=True)  # of a save that failed
        folder.mkdir()
        state = trainer.state
        best = state.best_global_step, state.best_model_checkpoint
        # With a best step Trainer waits in a collective of torch, in which a rank would wait for one that has failed.
        state.best_global_step = None
        self.is_collecting = True
        try:
            write_files()
        finally:
            self.is_collecting = False
            state.best_global_step, state.best_model_checkpoint = best
        training = self._training(trainer)
        # Of an object that several ranks give, any rank's may be stored: of these, whose values differ, one rank's.
        own: dict[str, Any] = {}
        if trainer.args.process_index == 0:
            _write_files(trainer, folder)
            found = Files.read(folder)
            own[FILES_KEY] = Files({name: found[name] for name in found if name not in _LEFT_OUT_FILES})
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

    def _training(self, trainer: Any) -> dict[str, Any]:
        """Return the state of model, optimizer, scheduler, scaler and random states; the same to save and to load."""
        model = self._model_state(trainer)
        if self._saves_only_model:
            return {"model": model}
        own: dict[str, Any] = {"random": PerRank(self.random)}
        if trainer.is_deepspeed_enabled:
            state = self._engine_state(trainer)
            if "scheduler" not in state:  # the engine does not know a scheduler that Trainer has made
                state["scheduler"] = trainer.lr_scheduler
            return state | own
        scaler = getattr(trainer.accelerator, "scaler", None)
        state = training_state(
            model=trainer.model,
            optimizer=unwrap_optimizer(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=scaler if scaler is not None and scaler.is_enabled() else None,
            random_states=False,
            extra=own,
        )
        return state | {"model": model}

    def _model_state(self, trainer: Any) -> Any:
        if trainer.is_deepspeed_enabled:
            return self._engine_state(trainer)["model"]
        is_adapter = _is_peft(trainer.model) and not self._saves_frozen_base
        return _AdapterState(trainer.model) if is_adapter else ModelState(trainer.model)

    def _engine_state(self, trainer: Any) -> dict[str, Any]:
        from dcp_remote.integrations.deepspeed import engine_state

        is_peft = _is_peft(trainer.model)
        return engine_state(
            trainer.model_wrapped,
            exclude_frozen_parameters=is_peft and not self._saves_frozen_base,
            is_strict=not is_peft,
        )

    # ---- loading

    @contextmanager
    def resume(self, trainer: Any, resume_from: Any) -> Iterator[Any]:
        """Give `Trainer.train` what to resume from: the folder of a checkpoint, filled with its small files, or None.

        Raises:
            InvalidArgumentError: The run has checkpoints, from which this training does not go on; or the checkpoint is
                not one of a trainer.
            CheckpointNotFoundError: The checkpoint that was asked for does not exist.
        """
        self._saved_step, self.best_url, self._read_from = None, None, None
        self.random = _HeldRandomStates()
        if resume_from is None and self._resumes and not self._has_saved:
            resume_from = True
        is_asked = resume_from is not None and resume_from is not False
        if not is_asked or (not self._is_own_url(resume_from) and _is_local(resume_from)):
            self._require_start(trainer)
            yield resume_from or None
            return
        manager, checkpoint = self._locate(resume_from)
        files, about = Files(), Opaque[Any](None)
        try:
            step = manager.restore(
                {FILES_KEY: files, ABOUT_KEY: about},
                checkpoint,
                unexpected="ignore",
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
            logger.warning("%s: there is no checkpoint yet: training starts from the beginning", self.url)
            yield None
            return
        self._read_from, self._read_entries = (manager, step), frozenset(about.value["entries"])
        _report_changes(trainer, about.value, manager.url, step)
        folder = self.folder / "resumed" / f"checkpoint-{step}"
        try:
            self._write_resumed(files, folder)
            yield str(folder)
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)

    def _write_resumed(self, files: Files, folder: Path) -> None:
        state = json.loads(files[_STATE_FILE])
        self.best_url, state["best_model_checkpoint"] = state["best_model_checkpoint"], None
        Files({**{name: files[name] for name in files}, _STATE_FILE: json.dumps(state).encode()}).write(folder)

    def restore(self, trainer: Any) -> None:
        """Read the tensors of the checkpoint that is being resumed into model and optimizer, in place; collective."""
        assert self._read_from is not None, "resume comes first"
        manager, step = self._read_from
        state = self._training(trainer)
        left_out = sorted(state.keys() - self._read_entries)
        for key in left_out:
            del state[key]
        if left_out:
            logger.warning("%s: step %d was saved without %s: they start anew", manager.url, step, ", ".join(left_out))
        manager.restore(
            state,
            step,
            unexpected="ignore",
            dtype="convert",  # masters of DeepSpeed are fp32, whatever the dtype of the model
            go_on=manager is self.manager,
            must_exist=True,
        )

    def load_best(self, trainer: Any) -> None:
        """Read the weights of the best checkpoint into the model; the run goes on from where it was."""
        url: str = trainer.state.best_model_checkpoint
        path = split_path(url) if not self.has_url(url) else None
        manager = self.manager if path is None else self._manager_of(path.run_url)
        name = url.rpartition("/")[2]
        logger.info("%s: loading the best model from %s (score: %s)", manager.url, name, trainer.state.best_metric)
        manager.restore(
            {"model": self._model_state(trainer)},
            name,
            unexpected="ignore",
            dtype="convert",
            go_on=False,
            must_exist=True,
        )

    def _locate(self, resume_from: Any) -> tuple[CheckpointManager, str | int | None]:
        """Return the manager of the run to resume from, and the step or name of the checkpoint; None is the newest."""
        text = str(resume_from).rstrip("/")
        if resume_from is True or text == self.url:
            return self.manager, None
        name = text.removeprefix(f"{self.url}/")
        if "/" not in name:
            return self.manager, int(name) if name.isdecimal() else name
        options = {name: self._settings[name] for name in ("storage_options",) if name in self._settings}
        wait_for_saves()
        path = find_checkpoint(text, **options)
        return self._manager_of(path.run_url), path.checkpoint

    def _is_own_url(self, resume_from: Any) -> bool:
        return str(resume_from).rstrip("/") == self.url or self.has_url(str(resume_from))

    def _manager_of(self, url: str) -> CheckpointManager:
        return manager_of(url, **{name: self._settings[name] for name in self._settings.keys() - _SAVING_SETTINGS})

    def _require_start(self, trainer: Any) -> None:
        """Refuse to train from elsewhere where the run has checkpoints: its first save would fail."""
        declares = self._settings.get("start_over") or self._settings.get("resumed_from") is not None
        if trainer.args.save_strategy == "no" or (declares and not self._has_saved):
            return
        try:
            found = self.manager.restore({ABOUT_KEY: Opaque(None)}, unexpected="ignore", go_on=False)
        except StateMismatchError:  # of another framework
            found = -1
        if found is not None:
            raise InvalidArgumentError(
                "This run has checkpoints already. Pass resume_from_checkpoint=True to go on from the newest; or "
                "start_over=True to remote(), once, to leave them behind; or use another URL.",
                url=self.url,
                newest=found if found >= 0 else None,
            )


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _write_files(trainer: Any, folder: Path) -> None:
    """Write configurations, tokenizer or processor, arguments and trainer state into the folder of a checkpoint."""
    model = trainer.model
    base = model.get_base_model() if _is_peft(model) else model
    configurations: tuple[Any, ...] = (getattr(base, "config", None), getattr(base, "generation_config", None))
    for config in configurations:
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
    if _is_peft(model):
        for name, config in model.peft_config.items():
            saved = copy.deepcopy(config)
            saved.inference_mode = True  # as PeftModel.save_pretrained does
            saved.save_pretrained(folder if name == "default" else folder / name)
    collator = getattr(trainer, "data_collator", None)
    processor: Any = getattr(trainer, "processing_class", None) or getattr(collator, "tokenizer", None)
    if hasattr(processor, "save_pretrained"):
        processor.save_pretrained(folder)
    arguments = json.dumps(trainer.args.to_dict(), indent=2, default=str)
    (folder / _ARGUMENTS_FILE).write_text(arguments)
    trainer.state.save_to_json(str(folder / _STATE_FILE))


def _metrics_of(state: Any) -> dict[str, float]:
    """Return the numbers that were logged at this step, and the step of the best checkpoint."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    metrics = {
        name: float(value)
        for entry in logged
        for name, value in entry.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
    best = (state.best_model_checkpoint or "").rpartition("checkpoint-")[2]
    return metrics | ({BEST_STEP_METRIC: float(best)} if best.isdecimal() else {})


def _global_batch(trainer: Any) -> int:
    """Return the number of samples of one step over all ranks."""
    arguments = trainer.args
    return int(trainer._train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size)


def _report_changes(trainer: Any, about: Mapping[str, Any], url: str, step: int) -> None:
    saved, here = about["global_batch"], _global_batch(trainer)
    if about["world_size"] != trainer.args.world_size:
        logger.info(
            "%s: step %d was saved by %d ranks and is loaded by %d",
            url,
            step,
            about["world_size"],
            trainer.args.world_size,
        )
    if saved != here and not trainer.args.ignore_data_skip:
        logger.warning(
            "%s: step %d was trained with %d samples a step, and this job has %d. Trainer finds its place in the data "
            "by the number of steps: samples are repeated or left out. Change gradient_accumulation_steps to keep %d.",
            *(url, step, saved, here, saved),
        )


def _is_local(resume_from: Any) -> bool:
    """Return whether this is a local folder, whose checkpoint `Trainer` loads itself."""
    return isinstance(resume_from, str | os.PathLike) and not is_remote(resume_from) and Path(resume_from).is_dir()


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _adapter_prefixes(model: Any) -> tuple[str, ...]:
    """Return the beginnings of the names of modules that are adapters."""
    tuner = getattr(model, "base_model", None)
    prefix = getattr(tuner, "prefix", None)
    return ("modules_to_save", "prompt_encoder", *((prefix,) if isinstance(prefix, str) and prefix else ()))


def _require_supported(trainer: Any) -> None:
    arguments = trainer.args
    _require_local_output(arguments)
    if arguments.push_to_hub and getattr(arguments.hub_strategy, "value", arguments.hub_strategy) != "end":
        raise InvalidArgumentError(
            "Checkpoints that go to object storage are not pushed to the Hub. Set hub_strategy='end'.",
            hub_strategy=str(arguments.hub_strategy),
        )
    mode = str(getattr(arguments.parallel_mode, "value", arguments.parallel_mode))
    if mode in {"tpu", "sagemaker_model_parallel"}:
        raise InvalidArgumentError("Trainers on XLA and SageMaker are not supported.", parallel_mode=mode)


def _with_retention(save_total_limit: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the retention that `save_total_limit` asks for."""
    if save_total_limit is None or save_total_limit <= 0:
        return dict(settings)
    if settings.get("retention") is not None:
        raise InvalidArgumentError(
            "save_total_limit and retention exclude each other: pass one of them.", save_total_limit=save_total_limit
        )
    return {**settings, "retention": KeepLatest(save_total_limit)}


def _require_local_output(arguments: Any) -> None:
    folder = getattr(arguments, "output_dir", None)
    if is_remote(folder):
        raise InvalidArgumentError(
            "output_dir must be a local folder, for logs and exports. Pass the URL to "
            "dcp_remote.integrations.transformers.remote(trainer, url).",
            output_dir=folder,
        )


@functools.cache
def _remote_class(own: Any) -> Any:
    return type(f"Remote{own.__name__}", (RemoteCheckpointMixin, own), {"__module__": own.__module__})


# ---- changes of Transformers itself, made when this module is imported

_enabled: Any = None
_make_trainer = Trainer.__init__
_parameters = inspect.signature(_make_trainer)
_load_engine = trainer_module.deepspeed_load_checkpoint


@functools.wraps(_make_trainer)
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _require_local_output(_parameters.bind_partial(self, *args, **kwargs).arguments.get("args"))
    _make_trainer(self, *args, **kwargs)
    if _enabled is not None:
        remote(self, _enabled[0], **_enabled[1])


@functools.wraps(_load_engine)
def _load_engine_if_local(engine: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
    """Leave a remote checkpoint to `_load_optimizer_and_scheduler`, which follows."""
    if any(part.startswith(_FOLDER_PREFIX) for part in Path(checkpoint_path).parts):
        return None
    return _load_engine(engine, checkpoint_path, *args, **kwargs)


Trainer.__init__ = _init
trainer_module.deepspeed_load_checkpoint = _load_engine_if_local
