"""Trainer of Lightning: strategies whose checkpoints go to runs in object storage.

    trainer = Trainer(
        strategy=RemoteModelParallelStrategy(),  # or RemoteFSDPStrategy, RemoteDeepSpeedStrategy(stage=3), …
        callbacks=[ModelCheckpoint(dirpath="s3://bucket/run", save_last=True)],
    )
    trainer.fit(module, ckpt_path="last")

`dirpath` is the URL of the run, and the name of a file is a name of a checkpoint in it. Lightning itself saves
to local folders.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn

from dcp_remote import CheckpointManager, ModelState, Opaque, PerRank, RandomStates, is_remote
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.integrations import lightning_files, runs
from dcp_remote.integrations.lightning_files import note_name, run_of, to_url
from dcp_remote.integrations.lightning_removal import Removals
from dcp_remote.integrations.lightning_values import metrics_of, to_plain
from dcp_remote.integrations.runs import CheckpointPath, framework_words
from dcp_remote.integrations.strategies import RunStrategy, refuse_url
from dcp_remote.integrations.wrappers import replaces, training_parts

logger = logging.getLogger(__name__)


class _DumpedModel(ModelState):
    """State of a model as Lightning dumped it; the model tells buffers, which differ between ranks, from parameters."""

    def __init__(self, model: Any, values: dict[str, Any]) -> None:
        super().__init__(model)
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return self._values


# Entries of a checkpoint beside those of `training_state`: what Lightning writes beside the tensors, and the positions
# of each rank in its data.
ABOUT_KEY = "lightning"
LOADERS_KEY = "loaders"

_LOADER_STATES = "combined_loader"

_STRICT = (
    "strict_loading = False of the LightningModule keeps weights that the checkpoint lacks, and leaves out those that "
    "the module lacks"
)
_WORDS = {
    "restore": "fit(ckpt_path='last') goes on from the newest checkpoint of dirpath",
    "start_over": "checkpoint_settings={'start_over': True} of the strategy leaves the checkpoints behind",
    "missing": _STRICT,
    "unexpected": _STRICT,
    "replicas": "checkpoint_settings={'replicas': 'coordinator'} of the strategy saves those of the lowest rank",
}


class RemoteStrategy(RunStrategy):
    """Methods of a strategy that save to and load from runs; they come before those of Lightning's strategy.

    A checkpoint is one commit of model, optimizers, schedulers, loops, callbacks, precision, hyperparameters, the
    random states of each rank and the positions of each rank's stateful data loaders. Its step is `global_step`, its
    name that of the file that `ModelCheckpoint` or `Trainer.save_checkpoint` asks for; a second name in the same step
    uploads nothing. Each rank writes and reads its own part of the tensors; nothing is gathered, also with
    `state_dict_type="full"` or `save_distributed_checkpoint=False`, which apply to local folders.

    `Trainer.save_checkpoint` returns when every rank has copied its state, and uploads in the background. A rank that
    does not call it within 30 s, or raises meanwhile, is an error on all ranks that did. An error of the upload is
    raised by the next save, or when `fit` ends; `fit` returns when the last checkpoint is committed. After a kill at
    any moment the run has the checkpoints that it had, and perhaps the new one, each whole.

    A save costs what `CheckpointManager.save` costs, one GET of the catalog, and up to four requests for each
    checkpoint that Lightning has removed; by rank 0.

    Args:
        arguments: Arguments of Lightning's strategy.
        checkpoint_settings: Keyword arguments of `CheckpointManager` for all runs of this trainer, such as
            `storage_options`, `start_over` and `allow_pickle`.
        options: Keyword arguments of Lightning's strategy.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Make Lightning's strategy; no request is sent."""
        super().__init__(*arguments, **options)
        lightning_files.open_options.update(runs.storage_of(self._settings))
        self._is_collecting = self._has_loaded_model = False
        # Runs from which this trainer has loaded, or to which it has saved.
        self._own_urls: set[str] = set()
        # Run and step of the last save, names of its checkpoint, and whether this has weights alone.
        self._saved_place: tuple[str, int] | None = None
        self._saved_names: set[str] = set()
        self._is_weights_alone = False
        self._failed_saves = 0  # before the last save
        self._removals = Removals(self._manager)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors are read into the model as the strategy has set it up."""
        return True

    # ---- saving

    def setup(self, trainer: Any) -> None:
        """Set up model and optimizers."""
        super().setup(trainer)
        for callback in self._savers():
            # With a slash at its end, Lightning would take a saved folder for another one, and forget its checkpoints.
            callback.dirpath = run_of(callback) or callback.dirpath

    def on_train_start(self) -> None:
        """Refuse to train where a save would be refused: in a run that has checkpoints, from which no state was loaded.

        Raises:
            InvalidArgumentError: There is such a run, on all ranks.
        """
        super().on_train_start()
        folders = sorted({str(callback.dirpath) for callback in self._savers() if run_of(callback) is None})
        if folders and self.is_global_zero:
            logger.warning("Checkpoints go to a local folder: %s. A run has a URL as dirpath.", ", ".join(folders))
        declares = self._settings.get("start_over") or self._settings.get("resumed_from") is not None
        for url in self._run_urls():
            manager = self._manager(url)
            found = None if declares or url in self._own_urls else self._find_newest(manager)
            if found is not None:
                raise InvalidArgumentError(
                    "This run has checkpoints already. Pass ckpt_path='last' to fit to go on from there; or "
                    "checkpoint_settings={'start_over': True} to the strategy, once, to leave them behind; or use "
                    "another dirpath.",
                    url=url,
                    newest=found,
                )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the tensors of the model: sharded, without a copy, while a checkpoint for a run is collected."""
        if self._is_collecting:
            return {} if self._engine is not None else dict(ModelState(self.model).state_dict())
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer; {} while a checkpoint for a run is collected, which has its own."""
        return {} if self._is_collecting else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save to a local path, as Lightning does; `trainer.save_checkpoint` saves to URLs.

        Raises:
            InvalidArgumentError: The path is a URL.
        """
        if is_remote(to_url(filepath)):
            raise InvalidArgumentError("Call trainer.save_checkpoint, which saves to URLs.", url=filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Take the name of a checkpoint, and delete the checkpoint if it has no other; after the next commit."""
        if not is_remote(to_url(filepath)):
            super().remove_checkpoint(filepath)
            return
        path = self._path_of(to_url(filepath))
        assert isinstance(path.checkpoint, str)
        note_name(path.run_url, path.checkpoint, is_given=False)
        self._saved_names.discard(path.checkpoint)
        self._removals.add(path)

    @framework_words(_WORDS)
    def teardown(self) -> None:
        """Wait for the last checkpoint, and raise its error; unless the training has failed, then log it."""
        has_failed = sys.exc_info()[0] is not None
        try:
            runs.wait_for_saves()
            if self.is_global_zero:
                self._removals.carry_out()
        except DcpRemoteError:
            if not has_failed:
                raise
            logger.exception("The last save failed as well.")
        finally:
            super().teardown()

    @framework_words(_WORDS)
    def _save(self, trainer: Any, url: str, *, weights_only: bool) -> None:
        path = self._path_of(url)
        manager = self._manager(path.run_url)
        manager.wait()
        failed_saves, self._failed_saves = self._failed_saves, manager.failed_saves
        step = trainer.global_step
        assert isinstance(path.checkpoint, str)
        if self.is_global_zero:
            self._removals.carry_out(path, step)
        if self._saved_place != (path.run_url, step):
            self._saved_place, self._saved_names, self._is_weights_alone = (path.run_url, step), set(), weights_only
        elif self._failed_saves > failed_saves:
            self._is_weights_alone = True  # perhaps: a whole save that was to replace the weights has failed
        self._saved_names.add(path.checkpoint)
        # A checkpoint of weights alone has no optimizer: a whole one of the same step takes its place and its names.
        is_replacing = self._is_weights_alone and not weights_only
        runs.save_step(
            path.run_url,
            step,
            lambda: self._collect(trainer, weights_only=weights_only),
            settings=self._settings,
            owners={"trainer": trainer},
            name=sorted(self._saved_names) if is_replacing else path.checkpoint,
            metrics=metrics_of(trainer),
            overwrite=is_replacing,
        )
        self._is_weights_alone = self._is_weights_alone and weights_only
        self._own_urls.add(path.run_url)
        note_name(path.run_url, path.checkpoint, is_given=True)

    def _collect(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        """Return the state to save. Called on all ranks, which have all come: hooks may use collectives of torch."""
        self._is_collecting = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
        finally:
            self._is_collecting = False
        state = self._tensors(is_training="optimizer_states" in checkpoint)
        if self._engine is None:
            state["model"] = _DumpedModel(self.model, checkpoint["state_dict"])  # which hooks may have changed
        rest = {key: value for key, value in checkpoint.items() if key not in {"state_dict", "optimizer_states"}}
        positions = rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop(_LOADER_STATES, None)
        rest["has_optimizers"] = "optimizer_states" in checkpoint
        rest["world_size"] = self.world_size
        about = Opaque(to_plain(rest, is_strict=not self._settings.get("allow_pickle")))
        state[LOADERS_KEY] = PerRank(Opaque(positions))
        # Of an object that several ranks give, any rank's may be stored; as in Lightning, that of rank 0 is.
        return state | {ABOUT_KEY: about} if self.is_global_zero else state

    # ---- loading

    @framework_words(_WORDS)
    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load a checkpoint: tensors into model and optimizers, in place; return the rest, as Lightning writes it.

        A checkpoint that no Trainer of Lightning has saved gives its weights, outside of `fit`.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint; lists those of the run.
            InvalidArgumentError: Training cannot resume from the checkpoint of another framework.
            StateMismatchError: The checkpoint has other entries than model and optimizers.
        """
        url = to_url(checkpoint_path)
        self._has_loaded_model = is_remote(url)
        if not is_remote(url):
            own: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return own
        trainer = self._trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        runs.wait_for_saves()
        path = self._locate(url)
        manager = self._manager(path.run_url)
        about, positions = runs.read_own(manager, path.checkpoint, ABOUT_KEY, LOADERS_KEY)
        if about is None and is_fitting:
            raise InvalidArgumentError(
                "This checkpoint was not saved by Lightning: fit cannot resume from it. Load its weights by "
                "trainer.validate(ckpt_path=…) or dcp_remote.load(url, keys='model.*').",
                url=url,
            )
        rest = {"pytorch-lightning_version": lightning_version} if about is None else dict(about)
        lightning_files.adopt_last(trainer, rest.get("callbacks", {}))
        has_optimizers = is_fitting and rest.pop("has_optimizers", False)
        is_strict = bool(self.lightning_module.strict_loading)
        state = self._tensors(is_training=has_optimizers)
        step = runs.restore_existing(manager, state, path.checkpoint, is_strict=is_strict, go_on=is_fitting)
        if is_fitting:
            self._own_urls.add(path.run_url)
            runs.note_step(path.run_url, step, trainer=trainer)
        if self._engine is None:
            rest["state_dict"] = state["model"].state_dict()  # as loaded: callbacks read it, such as WeightAveraging
        return self._as_lightning(rest, positions, url, has_optimizers=has_optimizers)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002  # Lightning's signature
        """Load the model, unless it was loaded from a run."""
        if not self._has_loaded_model:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, unless they were loaded from a run."""
        if checkpoint["optimizer_states"] or self._engine is not None:
            super().load_optimizer_state_dict(checkpoint)

    def _as_lightning(self, rest: dict[str, Any], positions: Any, url: str, *, has_optimizers: bool) -> dict[str, Any]:
        """Return the parts of a checkpoint as Lightning's own would have them."""
        saved_size = rest.pop("world_size", None)
        loop = rest.get("loops", {}).get("fit_loop", {}).get("state_dict")
        if loop is not None and positions is not None:
            if saved_size == self.world_size:
                loop[_LOADER_STATES] = positions
            else:
                logger.warning(
                    "%s was saved by %s ranks, and this job has %d: stateful data loaders begin the epoch anew.",
                    *(url, saved_size, self.world_size),
                )
        if has_optimizers:
            rest["optimizer_states"] = []  # which Lightning asks for; they are loaded
            rest["lr_schedulers"] = [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs]
        return rest

    def _locate(self, url: str) -> CheckpointPath:
        if not any(url.startswith(f"{run_url}/") for run_url in self._run_urls()):
            return runs.find_checkpoint(url, **lightning_files.open_options)
        path = self._path_of(url)
        name = str(path.checkpoint)
        return CheckpointPath(path.run_url, int(name) if name.isdecimal() else name)

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def _engine(self) -> Any:
        """Engine of DeepSpeed; None for other strategies."""
        return getattr(self, "deepspeed_engine", None)

    def _engine_state(self) -> dict[str, Any]:
        """Return the state of the engine, which has those of model, optimizer and scheduler; {} without an engine."""
        if self._engine is None:
            return {}
        from dcp_remote.integrations.deepspeed import engine_state

        return engine_state(self._engine, exclude_frozen_parameters=bool(self.exclude_frozen_parameters))

    def _manager(self, run_url: str) -> CheckpointManager:
        return runs.manager_of(run_url, **self._settings)

    def _path_of(self, url: str) -> CheckpointPath:
        """Return the run and the name of a file: below the `dirpath` of a callback, a name may have slashes."""
        run_url = next((one for one in self._run_urls() if url.startswith(f"{one}/")), url.rpartition("/")[0])
        return CheckpointPath(run_url, url.removeprefix(f"{run_url}/"))

    def _run_urls(self) -> list[str]:
        """Return the URLs to which callbacks save."""
        return sorted({url for url in map(run_of, self._savers()) if url is not None})

    def _savers(self) -> list[Any]:
        """Return the callbacks that save checkpoints to a folder or a run."""
        return [one for one in self._trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]

    def _tensors(self, *, is_training: bool) -> dict[str, Any]:
        """Return the state of model, optimizers, schedulers and random states; the same to save and to load."""
        engine = self._engine_state()
        if not is_training:
            return {"model": engine["model"] if engine else ModelState(self.model)}
        return training_parts(
            engine,
            models=[self.model],
            optimizers=self._trainer.optimizers,
            schedulers=[config.scheduler for config in self._trainer.lr_scheduler_configs],
            random_states=RandomStates(),
        )

    def _find_newest(self, manager: CheckpointManager) -> int | None:
        """Return the newest step of a run; one GET of rank 0, whose error all ranks raise."""
        found: Any = None
        if self.is_global_zero:
            try:
                # Abandoned ones as well: a save that has restored none of them is refused.
                info = manager.run.latest() or next(iter(manager.run.checkpoints()[-1:]), None)
                found = None if info is None else info.step
            except DcpRemoteError as error:
                found = error
        found = self.broadcast(found)
        if isinstance(found, DcpRemoteError):
            raise found
        return int(found) if found is not None else None


class RemoteFSDPStrategy(RemoteStrategy, FSDPStrategy):
    """`FSDPStrategy` with checkpoints in runs; see `RemoteStrategy`."""


class RemoteModelParallelStrategy(RemoteStrategy, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) with checkpoints in runs; see `RemoteStrategy`."""


class RemoteDDPStrategy(RemoteStrategy, DDPStrategy):
    """`DDPStrategy` with checkpoints in runs; see `RemoteStrategy`."""


class RemoteSingleDeviceStrategy(RemoteStrategy, SingleDeviceStrategy):
    """`SingleDeviceStrategy` with checkpoints in runs; see `RemoteStrategy`."""


class RemoteDeepSpeedStrategy(RemoteStrategy, DeepSpeedStrategy):
    """`DeepSpeedStrategy` with checkpoints in runs, of any stage for any other; see `RemoteStrategy`."""


# ---- change of Trainer itself, made when this module is imported

_FOLDER_STRATEGIES = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


@replaces(Trainer, "save_checkpoint")
def _save_checkpoint(
    save: Any, self: Any, filepath: Any, weights_only: Any = None, storage_options: Any = None
) -> None:
    """Save to a run by a strategy of this module, or to a local file as Lightning does."""
    url, strategy = to_url(filepath), self.strategy
    writes_by_fsspec = not isinstance(strategy, (RemoteStrategy, *_FOLDER_STRATEGIES))
    if not is_remote(url) or writes_by_fsspec or self.model is None:
        save(self, filepath, weights_only, storage_options)
        return
    if not isinstance(strategy, RemoteStrategy):
        refuse_url(filepath, strategy, module=__name__, user="Trainer")
    if storage_options is not None:
        raise InvalidArgumentError("Pass storage_options in checkpoint_settings of the strategy.")
    with self.profiler.profile("save_checkpoint"):
        strategy._save(self, url, weights_only=bool(weights_only))
