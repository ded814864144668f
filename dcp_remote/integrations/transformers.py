"""Trainer of Transformers: checkpoints in object storage instead of local folders.

    trainer = remote(Trainer(...), "s3://bucket/run")
    trainer.train(resume_from_checkpoint=True)

`remote` changes the class of a trainer to a subclass of its own class. Importing this module makes `Trainer` refuse a
URL as `output_dir`, of which it would make a local folder.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import transformers.trainer as trainer_module
from torch import nn
from transformers import Trainer, TrainerCallback

from dcp_remote import ModelState, is_remote
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations import runs
from dcp_remote.integrations.folders import leave_to_trainer
from dcp_remote.integrations.runs import framework_words
from dcp_remote.integrations.trainer_retention import with_retention
from dcp_remote.integrations.trainer_run import FOLDER_PREFIX, WORDS, RemoteRun
from dcp_remote.integrations.wrappers import replaces

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

TrainerT = TypeVar("TrainerT")


def remote(
    trainer: TrainerT,
    url: str,
    *,
    resume: bool = False,
    save_only_model: bool | None = None,
    save_frozen_base: bool = False,
    overlap: bool | None = None,
    **settings: Any,
) -> TrainerT:
    """Make a trainer save its checkpoints to a run in object storage, and resume from there; return the same trainer.

        trainer = remote(Trainer(model=model, args=args, train_dataset=data), "s3://bucket/run")
        trainer.train(resume_from_checkpoint=True)

    Every rank calls this. A checkpoint is one commit of model, optimizer, scheduler, scaler, the random states of each
    rank, and the small files that `Trainer` writes beside them (trainer state with that of callbacks, configurations,
    tokenizer, training arguments as JSON). Its step is `global_step`, its name `checkpoint-<step>`. Tensors are written
    and read by each rank by itself, whatever the trainer is wrapped in, and are never gathered.

    `train(resume_from_checkpoint=…)` takes True or "True", as a command line gives it (the newest checkpoint of the
    run; from the beginning, with a warning, if there is none), the URL of a run, the URL or name of a checkpoint, or a
    local folder, which `Trainer` loads itself. Without it, and without `start_over=True`, a run that has checkpoints
    is refused. `train` returns when the last checkpoint is committed.

    `args.save_total_limit` is the retention: the newest checkpoint and that of the best model always stay.
    `args.load_best_model_at_end` reads the best model from the run. With `notice_seconds`, SIGTERM makes all ranks save
    and stop at the same step.

    Args:
        trainer: `transformers.Trainer`, or an instance of a subclass whose `_save_checkpoint` calls that of its base.
        url: URL of the run, as for `CheckpointManager`.
        resume: True to resume from the newest checkpoint where `train` is not told from which, or is told a local
            folder, as by programs that look for one in `output_dir`. A URL or name still counts.
        save_only_model: True to save no optimizer, scheduler and random states; None is `args.save_only_model`.
        save_frozen_base: True to save the frozen parameters of a PEFT model as well, so that the checkpoint can be
            loaded without the base model; they are sent once. False saves adapters and what is trained.
        overlap: True if a save returns while the state is being copied, see `CheckpointManager.watch`: nothing but the
            optimizer's step may change weights between a save and that step, or the save fails. None does so where
            only code of Transformers runs there: of a class of trainer or model of users, or with a callback of theirs
            that has an event there, all is copied before. Without effect with FSDP1, DeepSpeed,
            `auto_find_batch_size`, and optimizers that are not those of torch.
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
    runs.require_settings(settings, listens=True)
    leave_to_trainer(url)
    subject._remote = RemoteRun(
        url.rstrip("/"),
        with_retention(subject.args.save_total_limit, settings),
        saves_only_model=subject.args.save_only_model if save_only_model is None else save_only_model,
        saves_frozen_base=save_frozen_base,
        resumes=resume,
        overlaps=overlap,
    )
    subject.add_callback(_RemoteCallback(subject._remote))
    own: Any = type(subject)
    subject.__class__ = _remote_class(own)
    return trainer


def enable(url: str, **settings: Any) -> None:
    """Make every `Trainer` that is made from now on save its checkpoints to a run, as `remote` does.

    For programs that make their trainer in their own code. Every rank calls this, before the trainer is made.

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


def load_weights(
    model: nn.Module,
    url: str,
    *,
    exclude: str | Sequence[str] = (),
    storage_options: Mapping[str, object] | None = None,
) -> int:
    """Load the weights of a checkpoint into a model, in place; called by every rank. Returns the step.

    The checkpoint may be another framework's: names are canonical, and dtypes are converted. Weights of the model that
    the checkpoint lacks stay as they are, such as a frozen base below adapters; the log names the first of them.

    Costs one to four requests per rank to find the checkpoint, and those of `CheckpointManager.restore`.

    Args:
        model: Model, plain or wrapped (DDP, FSDP, PEFT).
        url: URL of a run, for its newest checkpoint, or of a checkpoint in a run: `s3://bucket/run/checkpoint-500`.
        exclude: Patterns of weights that stay as they are, such as `model.classifier.*` for a head of another size.
        storage_options: Options of the store.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        StateMismatchError: No weight of the model is in the checkpoint, or shapes differ.
    """
    settings: dict[str, Any] = {} if storage_options is None else {"storage_options": storage_options}
    runs.wait_for_saves()
    path = runs.find_checkpoint(url, **settings)
    return runs.load_weights(path, ModelState(model), settings, exclude=exclude, missing="keep")


def _local_alone(name: str) -> Any:
    """Return a method that writes or reads a part of a local checkpoint as Trainer does, and none of a remote one."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self._remote.is_own((*args, *kwargs.values())[0]):
            getattr(super(RemoteCheckpointMixin, self), name)(*args, **kwargs)

    return method


class RemoteCheckpointMixin(_Base):
    """Methods of a trainer that `remote` has changed; they come before those of the trainer's own class.

    Code of `Trainer` and of the trainer's class still runs around a checkpoint: what it writes goes to a temporary
    folder, and from there into the checkpoint. Weights, optimizer and random states never lie there.
    """

    _remote: RemoteRun

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

    # A remote checkpoint is saved as a whole, and read as a whole when its optimizer is asked for.
    _save_optimizer_and_scheduler = _local_alone("_save_optimizer_and_scheduler")
    _save_scaler = _local_alone("_save_scaler")
    _save_rng_state = _local_alone("_save_rng_state")
    _load_from_checkpoint = _local_alone("_load_from_checkpoint")
    _load_scaler = _local_alone("_load_scaler")

    def store_flos(self) -> None:
        """Add up the operations of all ranks, by a collective of torch; not inside of a save, where a rank may fail."""
        if not self._remote.is_collecting:
            super().store_flos()

    # ---- loading

    @framework_words(WORDS)
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint in object storage if that is asked; wait for the last checkpoint. See `remote`."""
        if self.hp_search_backend is not None or kwargs.get("trial") is not None or (args and args[0] is not None):
            raise InvalidArgumentError(
                "A run holds one training, and a search for hyperparameters makes several. Make a trainer for each.",
                url=self._remote.url,
            )
        with self._remote.resume(self, resume_from_checkpoint) as folder:
            try:
                output = super().train(folder, *args, **kwargs)
            finally:
                self._remote.end_copies()
        self._remote.manager.wait()
        return output

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return no batch where all steps were made before the start: `Trainer` would make one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read model, optimizer and scheduler of a remote checkpoint into those of this trainer."""
        if self._remote.is_own(checkpoint):
            self._remote.restore(self)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states that were read from a remote checkpoint."""
        if self._remote.is_own(checkpoint):
            self._remote.random.apply()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        """Read the weights of the best checkpoint from the run."""
        self._remote.end_copies()
        if is_remote(self.state.best_model_checkpoint) or self._remote.has_url(self.state.best_model_checkpoint):
            self._remote.load_best(self)
        else:
            super()._load_best_model()


class _RemoteCallback(TrainerCallback):
    """Part of a remote trainer at moments that no method of `Trainer` marks in all versions."""

    def __init__(self, run: RemoteRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back the URL of the best checkpoint, which `Trainer` would take for a folder that was deleted.

        A training that had made all its steps ends, without a batch.
        """
        if self._run.best_url is not None:
            state.best_model_checkpoint = self._run.best_url
        control.should_training_stop |= state.global_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and stop, at one step on all ranks, after SIGTERM; without a save if the ranks agree on no step."""
        if self._run.settings.get("notice_seconds") is not None:
            control.should_save |= self._run.manager.reached_preemption(state.global_step)
            control.should_training_stop |= self._run.manager.should_stop
        return control


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
_parameters = inspect.signature(Trainer.__init__)


@replaces(Trainer, "__init__")
def _init(construct: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    _require_local_output(_parameters.bind_partial(self, *args, **kwargs).arguments.get("args"))
    construct(self, *args, **kwargs)
    if _enabled is not None:
        remote(self, _enabled[0], **_enabled[1])


@replaces(trainer_module, "deepspeed_load_checkpoint")
def _load_engine_if_local(load: Any, engine: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
    """Leave a remote checkpoint to `_load_optimizer_and_scheduler`, which follows."""
    if any(part.startswith(FOLDER_PREFIX) for part in Path(checkpoint_path).parts):
        return None
    return load(engine, checkpoint_path, *args, **kwargs)
