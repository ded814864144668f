"""torchtitan: a checkpoint manager whose folder is a run in object storage, by two options of the command line.

    --override.imports dcp_remote.integrations.torchtitan.remote_checkpoint --checkpoint.folder s3://bucket/run

Settings of the run follow the import as JSON:
`dcp_remote.integrations.torchtitan.remote_checkpoint={"storage_options": {"endpoint_url": "http://minio:9000"}}`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.config.override import override

from dcp_remote import CheckpointManager as RunManager
from dcp_remote import PerRank, Retention, is_remote
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.entries import keep_only
from dcp_remote.integrations.runs import find_checkpoint, framework_words, is_torchs, require_settings, storage_of

logger = logging.getLogger(__name__)

# Keys of torchtitan's states, and those under which all frameworks of this package save the same.
_KEYS = {OPTIMIZER: "optim", LR_SCHEDULER: "scheduler", DATALOADER: "loader"}

_WORDS = {
    "restore": "--checkpoint.enable goes on from the newest checkpoint",
    "start_over": 'remote_checkpoint={"start_over": true} leaves the checkpoints behind',
    "missing": "--checkpoint.load_step selects an older checkpoint, where the last one holds the model alone",
    "exclude": "--checkpoint.exclude_from_loading leaves states as they are",
    "replicas": 'remote_checkpoint={"replicas": "coordinator"} saves those of the lowest rank',
}


class RemoteCheckpointManager(CheckpointManager):
    """Checkpoint manager of torchtitan that saves to a run, and loads from there.

    Options of `checkpoint` mean what torchtitan says; `async_mode` has no effect, because each save is uploaded in the
    background. A save returns when every rank has copied its state: a rank that does not come within 30 s, or raises,
    is an error on all of them. The error of an upload is raised by the next save, or when the trainer closes. After a
    kill at any moment the run has the checkpoints that it had, and perhaps the new one, each whole. fsspec is not asked
    for the folder.

    Args:
        config: Settings of torchtitan, and of the run.
        parts: Parts of the training, as torchtitan passes them.

    Raises:
        InvalidArgumentError: The folder is no URL of object storage.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Settings of torchtitan, and of the run.

        Attributes:
            settings: Keyword arguments of `dcp_remote.CheckpointManager`.
        """

        settings: dict[str, Any] = field(default_factory=dict)

    folder: str

    def __init__(self, config: Any, **parts: Any) -> None:
        """Check the folder; no request is sent."""
        # Neither a thread that deletes folders nor a process group for torch's asynchronous saves is needed.
        super().__init__(replace(config, keep_latest_k=0, async_mode="disabled"), **parts)
        if not self.enable:
            return
        if not is_remote(self.folder):
            raise InvalidArgumentError(
                "checkpoint.folder must be the URL of a run, such as s3://bucket/run; or leave out the override.",
                folder=self.folder,
            )
        settings = dict(config.settings)
        require_settings(settings)
        if config.keep_latest_k:
            settings["retention"] = Retention(keep_last=config.keep_latest_k, keep_named=False)
        self._run = RunManager(self.folder, **settings)
        self._storage = storage_of(settings)
        # torchtitan's own loading would look for checkpoints there by fsspec; it is asked only if the run has none.
        self.folder = ""

    @framework_words(_WORDS)
    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002  # torchtitan's signature
        """Save in the background, if this step is to be saved; return whether it is."""
        if not self._should_save(curr_step, last_step):
            return False
        # torchtitan's trainer, which asks `maybe_wait_for_staging` before it changes the state; perhaps not a user's.
        if type(self.states.get("train_state")).__module__.startswith("torchtitan."):
            for optimizer in filter(is_torchs, self.states[OPTIMIZER]):
                self._run.watch(optimizer)
        is_export = last_step and self.last_save_model_only
        state = self._export if is_export else lambda: self._named(self.states)
        if last_step:
            self._run.wait()  # so that no save is under way, for which this one would be left out (`when_busy`)
        return self._run.save(curr_step, state, name=f"step-{curr_step}", exist_ok=True, wait="begun")

    @framework_words(_WORDS)
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a checkpoint of the run, in place; else from `initial_load_path`. Return whether there was one.

        Raises:
            CheckpointNotFoundError: The run has no checkpoint of this step.
            StateMismatchError: The checkpoint has other entries than the training.
        """
        states: dict[str, Any] = {}

        def choose(loaded: int) -> dict[str, Any]:
            # Of a seed checkpoint the model is all that torchtitan loads.
            states.update(self._named({MODEL: self.states[MODEL]} | (self._rest() if loaded else {})))
            return states

        asked = None if step == -1 else step
        loaded = self._run.restore(choose, asked, rename=keep_only(states), dtype="convert")
        return self._load_initial() if loaded is None else True

    @framework_words(_WORDS)
    def _close(self) -> None:
        """Wait for the last save, and raise its error."""
        if hasattr(self, "_run"):  # False where the folder was refused
            self._run.close()

    def _load_initial(self) -> bool:
        if self.initial_load_path is None or not is_remote(self.initial_load_path):
            return bool(super()._load())
        # torchtitan's name of a step, also where another program has saved the run.
        path = find_checkpoint(re.sub(r"/step-(\d+)/?$", r"/\1", self.initial_load_path), **self._storage)
        state = self._named({MODEL: self.states[MODEL]} | ({} if self.initial_load_model_only else self._rest()))
        with RunManager(path.run_url, **self._storage) as run:
            run.restore(state, path.checkpoint, rename=keep_only(state), dtype="convert", must_exist=True, go_on=False)
        return True

    def _rest(self) -> dict[str, Any]:
        """Return the states to load beside the model."""
        unknown = [key for key in self.exclude_from_loading if key not in self.states]
        if unknown:
            raise InvalidArgumentError(
                "checkpoint.exclude_from_loading names states that the training does not have: correct it.",
                unknown=", ".join(unknown),
                states=", ".join(self.states),
            )
        return {key: value for key, value in self.states.items() if key not in {MODEL, *self.exclude_from_loading}}

    def _named(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return states under the names of all frameworks of this package; positions in the data by rank."""
        named = {_KEYS.get(key, key): value for key, value in states.items() if value is not None}
        if "loader" in named:
            named["loader"] = PerRank(_Position(named["loader"]))
        return named

    def _export(self) -> dict[str, Any]:
        """Return the model alone, in the dtype of `export_dtype`."""
        values = self.states[MODEL].state_dict()
        return {
            "model": {
                name: value.to(self.export_dtype) if torch.is_tensor(value) and value.is_floating_point() else value
                for name, value in values.items()
            }
        }


class _Position:
    """Position of a rank's data loader, which is left out where the number of data parallel ranks has changed.

    Args:
        loader: Data loader of torchtitan.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, unless another number of ranks shared the data when it was saved.

        Raises:
            InvalidArgumentError: The position is that of another data parallel rank.
        """
        # torchtitan 0.3.0 and its main branch differ in these names, and in what they raise.
        saved = state.get("world_size", state.get("dp_world_size"))
        ranks = getattr(self._loader, "dp_world_size", getattr(self._loader, "_dp_world_size", saved))
        if saved != ranks:
            logger.warning(
                "the checkpoint was saved by another number of data parallel ranks (%s, and %s now): the data begins "
                "anew",
                *(saved, ranks),
            )
            return
        if getattr(self._loader, "_rank_id", None) not in {None, *state}:
            # Anew on this rank alone, ranks that share a batch by tensor parallelism would read different data.
            raise InvalidArgumentError(
                "The checkpoint has the position of this rank's data under another data parallel rank: the ranks have "
                "changed their places in the mesh. Pass --checkpoint.exclude_from_loading dataloader, by which the "
                "data begins anew.",
                rank=self._loader._rank_id,
                saved=", ".join(key for key in state if key.startswith("dp_rank")),
            )
        self._loader.load_state_dict(state)


@override(target=CheckpointManager.Config, description="Checkpoints in object storage, by dcp_remote")  # type: ignore[untyped-decorator]  # torchtitan may not be installed
def remote_checkpoint(config: Any, **settings: Any) -> RemoteCheckpointManager.Config:
    """Return the configuration of a `RemoteCheckpointManager` with the values of torchtitan's.

    Args:
        config: Configuration of torchtitan's manager.
        settings: Keyword arguments of `dcp_remote.CheckpointManager`.
    """
    return RemoteCheckpointManager.Config(
        **{one.name: getattr(config, one.name) for one in fields(config)}, settings=settings
    )
