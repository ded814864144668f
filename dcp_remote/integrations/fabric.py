"""Fabric of Lightning: strategies by which `fabric.save` and `fabric.load` take URLs of object storage.

fabric = Fabric(strategy=RemoteModelParallelStrategy(...))  # or RemoteFSDPStrategy, RemoteDeepSpeedStrategy, …
fabric.save("s3://bucket/run/step-100", {"model": model, "optimizer": optimizer, "step": 100})
fabric.load("s3://bucket/run", state)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dcp_remote import ModelState, Opaque, PerRank, as_plain, is_remote
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations import runs
from dcp_remote.integrations.runs import framework_words
from dcp_remote.integrations.strategies import RunStrategy, refuse_url
from dcp_remote.integrations.wrappers import replaces, training_parts

logger = logging.getLogger(__name__)

# Entries of a checkpoint beside those of `training_state`: the user's other values, and those that differ by rank.
VALUES_KEY = "fabric"
RANK_VALUES_KEY = "fabric_rank"

_STEP_KEYS = ("step", "global_step")

_STRICT = "strict=False keeps values that the checkpoint lacks, and leaves out those that the state lacks"
_WORDS = {
    "restore": "fabric.load(<URL of the run>, state) before the first save goes on from the newest checkpoint; with "
    "<URL of a checkpoint>, from an older one",
    "start_over": "checkpoint_settings={'start_over': True} of the strategy leaves the checkpoints behind",
    "exist_ok": "the same model and optimizer, without a step of the optimizer since, keep it under another name",
    "missing": _STRICT,
    "unexpected": _STRICT,
    "exclude": "a module in place of the state, as of fabric.load_raw, gets the weights alone",
    "PerRank": "PerRank(optimizer) in the state saves the parts of all ranks, where each keeps its own",
    "replicas": "checkpoint_settings={'replicas': 'coordinator'} of the strategy saves those of the lowest rank",
}


class RemoteStrategy(RunStrategy):
    """Methods of a strategy that save to and load from runs; they come before those of Lightning's strategy.

    The URL of a checkpoint is that of its run, and a name. Its step is `state["step"]` or `state["global_step"]`, else
    the number at the end of the name, such as `step-100.ckpt`. A second save of the same objects in the same step, and
    before the next step of their optimizers, uploads nothing, and only adds its name; any other second save of a step
    is refused.

    A checkpoint is one commit of models (`model.<fqn>`), optimizers (`optim.…`), schedulers (`scheduler.…`) and all
    other values of the state; data loaders with a state, and `PerRank` values, are those of each rank. Each rank writes
    and reads its own part of the tensors; nothing is gathered, whatever `state_dict_type` or
    `save_distributed_checkpoint` say for local folders.

    `fabric.save` returns when every rank has copied its state, and uploads in the background. A rank that does not call
    it within 30 s, as under `if fabric.global_rank == 0`, or that raises meanwhile, is an error on all ranks that did.
    An error of the upload is raised by the next save or load, by `runs.close_managers()`, or at the end of the process.
    After a kill at any moment the run has the checkpoints that it had, and perhaps the new one, each whole.

    Args:
        arguments: Arguments of Lightning's strategy.
        checkpoint_settings: Keyword arguments of `CheckpointManager` for all runs, such as `storage_options`.
        options: Keyword arguments of Lightning's strategy.
    """

    @framework_words(_WORDS)
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002  # Lightning's signature
    ) -> None:
        """Save to a run, or to a local folder as Lightning does.

        Raises:
            InvalidArgumentError: The URL names no checkpoint in a run, there is no step, or there is a filter.
        """
        if not is_remote(path):
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        if filter is not None or storage_options is not None:
            raise InvalidArgumentError(
                "A checkpoint of a run is saved whole: leave out filter, and pass storage_options in the strategy's "
                "checkpoint_settings.",
                url=path,
            )
        found = runs.split_path(str(path))
        # The number in a name, as in resnet50.ckpt, is perhaps no step: then the same number again is refused, unless
        # the optimizer has made no step since, as before the last save of a training.
        is_counted = _counted_step(state) is not None or _of_type(state, Optimizer)
        runs.save_step(
            found.run_url,
            _step_of(str(found.checkpoint), state, url=str(path)),
            lambda: self._saved_state(state),
            settings=self._settings,
            owners=_owners_of(state) if is_counted else {},
            name=str(found.checkpoint),
        )

    @framework_words(_WORDS)
    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,  # noqa: FBT001, FBT002  # Lightning's signature
        weights_only: Any = None,
    ) -> dict[str, Any]:
        """Load into a state, in place; return the values of the checkpoint that the state does not ask for.

        Costs one to four requests per rank to find the checkpoint, and those of two calls of
        `CheckpointManager.restore`; of one for a module.

        Args:
            path: URL of a run, for its newest checkpoint, or of a checkpoint in a run; or a local path.
            state: Dict as for `fabric.save`; or a module, as of `fabric.load_raw`, which gets the weights alone.
            strict: False to keep values of the state that the checkpoint lacks, and to leave out weights that the
                model lacks.
            weights_only: Without effect: a checkpoint of a run is loaded without code.

        Raises:
            CheckpointNotFoundError: There is no checkpoint; lists those of the run.
            StateMismatchError: State and checkpoint have other entries, shapes or dtypes.
        """
        if not is_remote(path):
            own: dict[str, Any] = super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
            return own
        if not state:
            raise InvalidArgumentError(
                "fabric.load of a URL needs a state to load into. dcp_remote.load(url) returns a whole checkpoint.",
                url=path,
            )
        runs.wait_for_saves()
        found = runs.find_checkpoint(str(path), **runs.storage_of(self._settings))
        manager = runs.manager_of(found.run_url, **self._settings)
        if isinstance(state, nn.Module):
            weights = {"model": ModelState(state)}
            runs.restore_existing(manager, weights, found.checkpoint, go_on=False, is_strict=strict)
            return {}
        template = self._tensors(state)
        # First, since checkpoints of other frameworks have none of these, and may yet have all that is asked for.
        values, of_rank = runs.read_own(manager, found.checkpoint, VALUES_KEY, RANK_VALUES_KEY)
        if strict:
            _require_values(state, values or {}, url=str(path))
        step = runs.restore_existing(manager, template, found.checkpoint, is_strict=strict)
        runs.note_step(found.run_url, step, **_owners_of(state))
        is_same_size = of_rank is not None and of_rank["world_size"] == self._ranks
        positions = of_rank["loaders"] if is_same_size else {}
        lacking = [key for key, value in state.items() if _is_loader(value) and key not in positions]
        if lacking:
            logger.warning(
                "%s was saved by another number of ranks, or without these data loaders, which stay as they are: %s.",
                *(path, ", ".join(lacking)),
            )
        return _apply(state, (values or {}) | positions)

    @property
    def _ranks(self) -> int:
        """Number of ranks."""
        return int(getattr(self, "world_size", 1))

    def _tensors(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of models, optimizers, schedulers and `PerRank` values; the same to save and to load."""
        engine, models = self._engine_state(state), _of_type(state, nn.Module)
        if not models and not engine:
            raise InvalidArgumentError(
                "The state has no model. Put the model that fabric.setup returned into the state."
            )
        return training_parts(
            engine,
            models=models,
            optimizers=_of_type(state, Optimizer),
            schedulers=_of_type(state, LRScheduler),
            extra=_of_type(state, PerRank),
        )

    def _engine_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the engine, which has those of model and optimizer; {} for other strategies."""
        return {}

    def _saved_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        tensors = self._tensors(state)
        rest = {key: value for key, value in state.items() if _is_value(value)}
        own = {key: value.state_dict() for key, value in rest.items() if _is_loader(value)}
        values = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in rest.items()
            if key not in own
        }
        tensors[RANK_VALUES_KEY] = PerRank(Opaque({"world_size": self._ranks, "loaders": own}))
        # Of an object that several ranks give, any rank's may be stored; as in Lightning, that of rank 0 is.
        return tensors | {VALUES_KEY: Opaque(as_plain(values))} if self.is_global_zero else tensors


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

    def _engine_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        from deepspeed import DeepSpeedEngine

        from dcp_remote.integrations.deepspeed import engine_state

        engines = list(_of_type(state, DeepSpeedEngine).values())
        if len(engines) != 1:
            raise InvalidArgumentError("The state must have one model that fabric.setup returned.", models=len(engines))
        return engine_state(engines[0])


def _step_of(name: str, state: Mapping[str, Any], *, url: str) -> int:
    counted = _counted_step(state)
    if counted is not None:
        return counted
    number = re.search(r"(?<![\d.])(\d+)(?:\.[A-Za-z]+)?\Z", name)  # not that of loss=0.52
    if number is not None:
        return int(number[1])
    raise InvalidArgumentError(
        "A checkpoint has a step: end its name in the number of finished steps, as step-100.ckpt, or put this number "
        'into the state as "step".',
        url=url,
    )


def _counted_step(state: Mapping[str, Any]) -> int | None:
    return next((state[key] for key in _STEP_KEYS if isinstance(state.get(key), int)), None)


def _owners_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects whose tensors a save writes."""
    return _of_type(state, nn.Module | Optimizer)


def _of_type(state: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, kind)}


def _is_value(value: Any) -> bool:
    """Return whether a value has no entry of its own."""
    is_optimizer = isinstance(value, Optimizer) or type(value).__name__.startswith("DeepSpeed")
    return not (is_optimizer or isinstance(value, nn.Module | LRScheduler | PerRank))


def _is_loader(value: Any) -> bool:
    is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return is_stateful and hasattr(value, "__iter__") and not isinstance(value, nn.Module)  # as nn.Sequential is


def _require_values(state: Mapping[str, Any], values: Mapping[str, Any], *, url: str) -> None:
    """Refuse a checkpoint that lacks values of a state, but for data loaders: ranks have their own.

    Raises:
        InvalidArgumentError: The checkpoint lacks some.
    """
    asked = [key for key, value in state.items() if _is_value(value) and not _is_loader(value)]
    missing = [key for key in asked if key not in values]
    if missing:
        raise InvalidArgumentError(
            "The checkpoint lacks these values of the state; nothing was loaded. strict=False keeps them as they are.",
            url=url,
            missing=", ".join(missing),
        )


def _apply(state: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Put the values that were loaded into a state; return the others."""
    for key in [key for key, value in state.items() if _is_value(value)]:
        if key not in values:
            continue
        value = values.pop(key)
        if hasattr(state[key], "load_state_dict"):
            state[key].load_state_dict(value)
        else:
            state[key] = value
    return values


# ---- changes of Fabric itself, made when this module is imported

_FOLDER_STRATEGIES = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


@replaces(Fabric, "save")
def _save(save: Any, self: Any, path: Any, *arguments: Any, **options: Any) -> None:
    """Save as the strategy does; refuse URLs for those of Lightning that write folders."""
    is_of_folders = isinstance(self.strategy, _FOLDER_STRATEGIES) and not isinstance(self.strategy, RemoteStrategy)
    if is_of_folders and is_remote(path):
        refuse_url(path, self.strategy, module=__name__, user="Fabric")
    save(self, path, *arguments, **options)
