"""torchtitan: a checkpoint manager whose folder is a run in object storage, by two options of the command line.

    --override.imports dcp_remote.integrations.torchtitan.remote_checkpoint --checkpoint.folder s3://bucket/run

Settings of the run follow the import as JSON:
`dcp_remote.integrations.torchtitan.remote_checkpoint={"storage_options": {"endpoint_url": "http://minio:9000"}}`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.config.override import override

from dcp_remote import PerRank, Retention, is_remote
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.entries import keep_only
from dcp_remote.integrations.runs import manager_of

logger = logging.getLogger(__name__)

# Keys of torchtitan's states, and those under which all frameworks of this package save the same.
_KEYS = {OPTIMIZER: "optim", LR_SCHEDULER: "scheduler", DATALOADER: "loader"}


class RemoteCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan may not be installed
    """Checkpoint manager of torchtitan that saves to a run, and loads from there.

    `checkpoint.interval`, `keep_latest_k`, `load_step`, `exclude_from_loading`, `last_save_model_only`,
    `export_dtype`, `enable_first_step_checkpoint` and `load_only` mean what torchtitan says. Saves go on in the
    background, whatever `async_mode` is. A save returns when every rank has copied its state: a rank that does not come
    within 30 s, or raises, is an error on all of them. After a kill at any moment the run has the checkpoints that it
    had, and perhaps the new one, each whole. fsspec is not asked for the folder.

    Args:
        config: Settings of torchtitan, and of the run.
        given: Parts of the training, as torchtitan passes them.

    Raises:
        InvalidArgumentError: The folder is no URL of object storage.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # as above
        """Settings of torchtitan, and of the run.

        Attributes:
            settings: Keyword arguments of `dcp_remote.CheckpointManager`.
        """

        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Any, **given: Any) -> None:
        # Neither a thread that deletes folders nor a process group for torch's asynchronous saves is needed.
        super().__init__(replace(config, keep_latest_k=0, async_mode="disabled"), **given)
        if not self.enable:
            return
        if not is_remote(self.folder):
            raise InvalidArgumentError(
                "checkpoint.folder must be the URL of a run, such as s3://bucket/run; or leave the override out.",
                folder=self.folder,
            )
        kept = {"retention": Retention(keep_last=config.keep_latest_k, keep_named=False)}
        self._run = manager_of(self.folder, **{**(kept if config.keep_latest_k else {}), **config.settings})

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002  # torchtitan's signature
        """Save in the background, if this step is to be saved; return whether it is."""
        if not self._should_save(curr_step, last_step):
            return False
        is_model_only = last_step and self.last_save_model_only
        self._run.save(
            curr_step,
            self._exported if is_model_only else lambda: self._named(self.states),
            name=f"step-{curr_step}",
            exist_ok=True,
            wait="begun",
        )
        if last_step:
            self._run.wait()
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a checkpoint of the run, in place; else from `initial_load_path`. Return whether there was one.

        Raises:
            CheckpointNotFoundError: The run has no checkpoint of this step.
            StateMismatchError: The checkpoint has other entries than the training.
        """
        newest = self._run.latest()
        if newest is None and step == -1:
            return self._load_initial()
        chosen = step if step != -1 or newest is None else newest.step
        states = {MODEL: self.states[MODEL]} if chosen == 0 else self._states_of(self.exclude_from_loading)
        self._restore(self._run, states, chosen, goes_on=True)
        return True

    def _wait_for_saving(self) -> None:
        """Wait for the last save, and raise its error."""
        self._run.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: a save has copied the state when it returns."""

    def _close(self) -> None:
        """Wait for the last save, and raise its error."""
        if hasattr(self, "_run"):
            self._run.wait()

    def _load_initial(self) -> bool:
        path, is_hf = self.initial_load_path, self.initial_load_in_hf
        if path is not None and is_remote(path):
            states = {MODEL: self.states[MODEL]} if self.initial_load_model_only else self.states
            self._restore(manager_of(path), states, None, goes_on=False)
            return True
        if path is None and not is_hf:
            return False
        folder = path if path is not None else self.sd_adapter.hf_assets_path
        states = self._states_to_load(self.initial_load_model_only)
        self.dcp_load(states, checkpoint_id=folder, from_hf=is_hf, from_quantized=self.initial_load_in_hf_quantized)
        return True

    def _restore(self, run: Any, states: Mapping[str, Any], step: int | None, *, goes_on: bool) -> None:
        state = self._named(states)
        run.restore(state, step, rename=keep_only(*state), dtype="convert", go_on=goes_on, must_exist=True)

    def _states_of(self, excluded: list[str]) -> dict[str, Any]:
        unknown = [key for key in excluded if key not in self.states]
        if unknown:
            raise InvalidArgumentError(
                "exclude_from_loading names states that the training does not have.", unknown=", ".join(unknown)
            )
        return {key: value for key, value in self.states.items() if key not in excluded}

    def _named(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return states under the names of all frameworks of this package; positions in the data by rank."""
        named = {_KEYS.get(key, key): value for key, value in states.items() if value is not None}
        if "loader" in named:
            named["loader"] = PerRank(_Position(named["loader"]))
        return named

    def _exported(self) -> dict[str, Any]:
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
        """Go to a position, unless other ranks shared the data when it was saved."""
        own = self._loader.state_dict()
        if own.keys() == state.keys() and own.get("world_size") == state.get("world_size"):
            self._loader.load_state_dict(state)
        else:
            logger.warning("the checkpoint was saved by other data parallel ranks: the data begins anew")


@override(target=CheckpointManager.Config, description="Checkpoints in object storage, by dcp_remote")  # type: ignore[untyped-decorator]  # as above
def remote_checkpoint(config: Any, **settings: Any) -> RemoteCheckpointManager.Config:
    """Return the configuration of a `RemoteCheckpointManager` with the values of torchtitan's.

    Args:
        config: Configuration of torchtitan's manager.
        settings: Keyword arguments of `dcp_remote.CheckpointManager`.
    """
    return RemoteCheckpointManager.Config(
        **{one.name: getattr(config, one.name) for one in fields(config)}, settings=settings
    )
