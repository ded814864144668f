"""State of an engine of DeepSpeed as parts that a `CheckpointManager` saves and restores."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from dcp_remote import Opaque, OptimizerState
from dcp_remote.common.text import join_some
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.wrappers import canonical
from dcp_remote.integrations.zero import has_layout, names_of, read_layout
from dcp_remote.integrations.zero_optimizer import ZeroOptimizerState

logger = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def engine_state(
    engine: Any,
    *,
    client_state: Mapping[str, Any] | None = None,
    exclude_frozen_parameters: bool = False,
    is_strict: bool = True,
) -> dict[str, Any]:
    """Return the state of an engine, as `CheckpointManager.save` and `restore` take it; an ordinary dict.

    Nothing is copied or asked of the engine here. A restore writes into the flat partitions in place, then copies the
    masters into the 16-bit parameters, and puts back counters, scheduler and loss scaler:

        state = engine_state(engine)
        checkpoints.restore(state, unexpected="ignore", dtype="convert")
        state["deepspeed"].client_state

    Without `unexpected="ignore"` a restore refuses checkpoints that have more beside the model, such as random states.

    Args:
        engine: Engine.
        client_state: Values of the user, of the types that `refused_values` does not name; those of rank 0 are stored.
        exclude_frozen_parameters: True to leave out parameters that need no gradient.
        is_strict: False if a restore leaves parameters as they are that the checkpoint lacks, and leaves out those that
            the module lacks.

    Raises:
        InvalidArgumentError: The engine has model, pipeline or expert parallelism; the layout of its optimizer is not
            known (see `zero.read_layout`). Some are raised when the state is saved or restored, on all ranks.
    """
    require_supported(engine)
    state: dict[str, Any] = {
        "model": EngineModelState(engine, exclude_frozen_parameters=exclude_frozen_parameters, is_strict=is_strict),
        "deepspeed": EngineState(engine, client_state),
    }
    if has_layout(engine):
        if getattr(engine.optimizer, "optimizer", None) is not None:
            state["optim"] = ZeroOptimizerState(engine)
    elif engine.optimizer is not None:
        state["optim"] = OptimizerState(engine.module, engine.optimizer)
    if engine.lr_scheduler is not None:
        state["scheduler"] = SchedulerState(engine.lr_scheduler)
    return state


class EngineModelState:
    """Master copies of the trained parameters; frozen parameters, buffers and extra states. A `Stateful`.

    Args:
        engine: Engine.
        exclude_frozen_parameters: True to leave out parameters that need no gradient.
        is_strict: True to refuse a checkpoint that has parameters which the module lacks, or lacks parameters.
    """

    def __init__(self, engine: Any, *, exclude_frozen_parameters: bool, is_strict: bool) -> None:
        """Keep the engine."""
        self._engine, self._excludes_frozen, self._is_strict = engine, exclude_frozen_parameters, is_strict

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts, which share memory with the engine."""
        module = self._engine.module
        # Of partitioned parameters these are empty tensors, and no parameter is gathered.
        values = {canonical(name): value for name, value in module.state_dict().items()}
        names = names_of(module)
        if has_layout(self._engine):
            layout = read_layout(self._engine)
            masters = {name: boxes for fragment, boxes in layout.masters() for name in names[id(fragment.parameter)]}
            values |= {name: boxes for name, boxes in (masters | layout.frozen).items() if name in values}
        if self._excludes_frozen:
            for parameter in module.parameters():
                for name in () if parameter.requires_grad else names[id(parameter)]:
                    values.pop(name, None)
        return values

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values to load into.

        Raises:
            StateMismatchError: The checkpoint has parameters that the module lacks.
        """
        values = self.state_dict()
        if not self._is_strict:
            saved = set(names)
            return {name: value for name, value in values.items() if name in saved}
        unexpected = [name for name in names if name not in values]
        if unexpected:
            raise StateMismatchError(
                "The checkpoint has values of the model that the module lacks; nothing was loaded. "
                "load_module_strict=False leaves them out.",
                unexpected=len(unexpected),
                names=join_some(unexpected),
            )
        return values

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set extra states, and copy the masters into the parameters; all tensors were read in place.

        A collective of torch in ZeRO.
        """
        for path, child in self._engine.module.named_modules():
            name = canonical(f"{path}._extra_state".lstrip("."))
            if name in values:
                child.set_extra_state(values[name])
        if has_layout(self._engine):
            read_layout(self._engine).refresh()


class SchedulerState:
    """State of a scheduler, of which a restore takes what the checkpoint has. A `Stateful`.

    Attributes:
        is_required: True if a restore refuses a checkpoint without a scheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        """Keep the scheduler."""
        self._scheduler = scheduler
        self.is_required = False

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        return dict(self._scheduler.state_dict())

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values to load into; none if the checkpoint has no scheduler.

        Raises:
            StateMismatchError: The checkpoint has no scheduler, and `is_required` is true.
        """
        if self.is_required and not names:
            raise StateMismatchError(
                "The checkpoint has no state of the scheduler; nothing was loaded. To load the rest, pass "
                "load_lr_scheduler_states=False."
            )
        return _pick(self.state_dict(), names)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set the scheduler."""
        if values:
            self._scheduler.load_state_dict(dict(values))


class EngineState:
    """Counters, loss scaler and client state of an engine; entries below `deepspeed`. A `Stateful`.

    Args:
        engine: Engine.
        client_state: Values of the user; those of rank 0 are stored.

    Attributes:
        client_state: Values of the user; after a restore those of the checkpoint, empty if it has none.
        is_setting_counters: False if a restore sets the client state alone.
        has_counters: True if the checkpoint of the last restore has counters, which another framework's has not.
    """

    def __init__(self, engine: Any, client_state: Mapping[str, Any] | None = None) -> None:
        """Keep the engine."""
        self._engine = engine
        self.client_state: dict[str, Any] = dict(client_state or {})
        self.is_setting_counters = True
        self.has_counters = False

    def count_from(self, step: int) -> None:
        """Set the counters to those after some steps of this engine's batch size."""
        engine = self._engine
        engine.global_steps, engine.skipped_steps = step, 0
        engine.global_samples = step * engine.train_batch_size()
        engine.micro_steps = step * engine.gradient_accumulation_steps()
        logger.info("the checkpoint has no counters of DeepSpeed: global_steps is %d, its step", step)

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the engine; the client state on rank 0 alone, since that of any rank might be stored."""
        values = self._values()
        if dist.get_rank():
            del values["client_state"]
        return values

    def _values(self) -> dict[str, Any]:
        engine = self._engine
        if engine.micro_steps % engine.gradient_accumulation_steps():
            logger.warning(
                "this checkpoint is saved between two steps of the optimizer: the gradients that micro steps have "
                "accumulated since step %d are not saved",
                engine.global_steps,
            )
        values: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
        values |= {
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "zero_stage": int(engine.zero_optimization_stage()),
            "world_size": engine.dp_world_size,
            "version": deepspeed.__version__,
            "loss_scaler": _fields_of(_scaler_of(engine)),
            # One entry, given back whole.
            "client_state": Opaque(self.client_state).state_dict(),
        }
        return values | {name: dict(part.state_dict()) for name, part in self._parts()}

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values to load into: those that the checkpoint has."""
        self.client_state, self.has_counters = {}, "global_steps" in names
        # All of another loss scaler's, so that none is unexpected; which of them count, `_set_fields` decides.
        fields = {name.removeprefix("loss_scaler."): None for name in names if name.startswith("loss_scaler.")}
        return _pick(self._values() | {"loss_scaler": fields}, names)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set the engine; a micro step within an accumulation goes back to the accumulation's first."""
        engine = self._engine
        if "client_state" in values:
            loaded: Opaque[dict[str, Any]] = Opaque({})
            loaded.load_state_dict(values["client_state"])
            self.client_state = loaded.value
        if not self.is_setting_counters or "global_steps" not in values:
            return
        for name in _COUNTERS:
            if name in values:
                setattr(engine, name, values[name])
        accumulation = engine.gradient_accumulation_steps()
        if values.get("gradient_accumulation_steps") != accumulation:
            engine.micro_steps = engine.global_steps * accumulation
        engine.micro_steps -= engine.micro_steps % accumulation
        _set_fields(_scaler_of(engine), values.get("loss_scaler", {}))
        for name, part in self._parts():
            if name in values:
                part.load_state_dict(values[name])

    def _parts(self) -> Iterator[tuple[str, Any]]:
        engine = self._engine
        if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
            yield "random_ltd", engine.random_ltd_scheduler
        if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
            yield "data_sampler", engine.training_dataloader.data_sampler
        grad_scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        if grad_scaler is not None:
            yield "grad_scaler", grad_scaler


def _scaler_of(engine: Any) -> Any:
    """Return the object that has the loss scale as `cur_scale`; None if the engine has none."""
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


def _fields_of(scaler: Any) -> dict[str, Any]:
    """Return the fields of a loss scaler, which is an object that only code can load."""
    if scaler is None:
        return {}
    simple = {name: value for name, value in vars(scaler).items() if isinstance(value, bool | int | float)}
    return simple | {"is_dynamic": _is_dynamic(scaler)}


def _set_fields(scaler: Any, values: Mapping[str, Any]) -> None:
    """Set the fields of a loss scaler of the same kind; a static one has nothing that training changes."""
    if scaler is None or not values.get("is_dynamic") or not _is_dynamic(scaler):
        return
    for name in vars(scaler).keys() & values.keys():
        setattr(scaler, name, values[name])


def require_supported(engine: Any) -> None:
    """Refuse an engine whose ranks hold different parameters under one name.

    Raises:
        InvalidArgumentError: There is such parallelism.
    """
    tensor_parallel = engine.autotp_size() if hasattr(engine, "autotp_size") else 1
    found = {
        "model parallelism": engine.mp_world_size > 1,
        "tensor parallelism": tensor_parallel > 1,
        "pipeline parallelism": bool(getattr(engine, "pipeline_parallelism", False)),
        "experts (MoE)": bool(getattr(engine, "has_moe_layers", False)),
    }
    if any(found.values()):
        raise InvalidArgumentError(
            "Checkpoints of this engine cannot be saved to or loaded from a URL: its ranks hold different parameters "
            "under one name. Use DeepSpeed's own checkpoints in a local folder.",
            found=", ".join(name for name, is_used in found.items() if is_used),
            mp_world_size=engine.mp_world_size,
        )


def _pick(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the values, at any depth of dicts, that have a name or a part of it among some names."""
    picked: dict[str, Any] = {}
    for key, value in values.items():
        below = [name[len(key) + 1 :] for name in names if name.startswith(f"{key}.")]
        if isinstance(value, dict) and below:
            picked[key] = _pick(value, below)
        elif key in names or below:
            picked[key] = value
    return picked
