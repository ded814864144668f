"""DeepSpeed: `engine.save_checkpoint("s3://bucket/run")` and `engine.load_checkpoint`, for ZeRO stages 0 to 3.

    engine, *_ = deepspeed.initialize(model=model, config=config, …)
    attach(engine)                                              # or `enable()`, once, for all engines of the process
    engine.load_checkpoint("s3://bucket/run")
    engine.save_checkpoint("s3://bucket/run", tag="best", client_state={"epoch": 3})

Every rank saves its own parts of the flat partitions, under the true names and shapes of the parameters: no parameter
is gathered, and any number of ranks and any stage loads what any other saved. So do `CheckpointManager.restore` with
`training_state`, `dcp.load` and `dcp_remote.load`.

| entry | |
|---|---|
| `model.<fqn>` | master copy (fp32) of each trained parameter; frozen parameters and buffers in their own dtype |
| `optim.state.<fqn>.<key>`, `optim.param_groups.<n>.<key>` | state of the base optimizer, as torch names it |
| `scheduler.<key>` | state of the learning rate scheduler |
| `deepspeed.<key>` | counters, `loss_scaler.<field>`, `client_state`, and how the engine was set up |
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from dcp_remote import CheckpointManager, LocalBoxes, Opaque, OptimizerState, is_remote
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.runs import manager_of
from dcp_remote.integrations.wrappers import canonical
from dcp_remote.integrations.zero import Layout, has_layout, names_of, read_layout

__all__ = ["EngineState", "attach", "disable", "enable", "engine_state"]

logger = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")

_NAMES_SHOWN_MAX = 10

# Attribute of the methods that `attach` and `enable` set.
_MARK = "_dcp_remote"

# The methods as DeepSpeed has them, while `enable` is in force.
_originals: dict[str, Callable[..., Any]] = {}


# ---- what users call


def attach(engine: Any, *, wait: bool = False, **settings: Any) -> None:
    """Make an engine's `save_checkpoint` and `load_checkpoint` take URLs; both go on taking local folders.

    Signatures and results are DeepSpeed's. The URL is that of a run; `tag` is a name of the checkpoint, by default
    `global_step<n>`, and its step is `engine.global_steps`. Every rank calls both methods. A second save in the same
    step uploads nothing, and only adds its tag. `load_checkpoint` without a tag takes the newest checkpoint, and
    returns `(None, None)` if there is none, with a warning. `save_latest` and `custom_load_fn` have no effect, and
    `save_16bit_model` refuses URLs, because it would make a local folder of that name.

    A save copies this rank's partitions into memory that is kept for the next save, and returns; upload and commit go
    on in the background. Its error is raised by the next save or load, by `runs.close_managers()`, or at the end of
    the process. After a kill at any moment the run has the checkpoints that it had, and perhaps the new one, each
    whole. Memory and requests: see `CheckpointManager.save`; no collective of torch is called in a save.

    Args:
        engine: Engine that `deepspeed.initialize` returned.
        wait: True if a save returns only when the checkpoint is committed; its state is not copied then.
        settings: Keyword arguments of `CheckpointManager`, such as `retention` and `storage_options`.

    Raises:
        InvalidArgumentError: This is no engine, or parallelism or optimizer are not supported; see `engine_state`.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise InvalidArgumentError(
            "attach takes the engine that deepspeed.initialize returns.", type=type(engine).__qualname__
        )
    _require_supported(engine)
    for name, method in _methods(settings, is_waiting=wait).items():
        setattr(engine, name, MethodType(method, engine))


def enable(*, wait: bool = False, **settings: Any) -> None:
    """Do as `attach` for every engine of this process, also those that Transformers, Accelerate or Lightning make.

    Once more, with other settings, replaces them. `disable` undoes this.

    Args:
        wait: See `attach`.
        settings: See `attach`.
    """
    for name, method in _methods(settings, is_waiting=wait).items():
        _originals.setdefault(name, getattr(DeepSpeedEngine, name))
        setattr(DeepSpeedEngine, name, method)


def disable() -> None:
    """Give all engines DeepSpeed's own methods again; those of `attach` stay."""
    for name, method in _originals.items():
        setattr(DeepSpeedEngine, name, method)
    _originals.clear()


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
    _require_supported(engine)
    state: dict[str, Any] = {
        "model": _ModelState(engine, exclude_frozen_parameters=exclude_frozen_parameters, is_strict=is_strict),
        "deepspeed": EngineState(engine, client_state),
    }
    if has_layout(engine):
        if getattr(engine.optimizer, "optimizer", None) is not None:
            state["optim"] = _OptimizerParts(engine)
    elif engine.optimizer is not None:
        state["optim"] = OptimizerState(engine.module, engine.optimizer)
    if engine.lr_scheduler is not None:
        state["scheduler"] = _Scheduler(engine.lr_scheduler)
    return state


# ---- the methods of the engine


def _methods(settings: Mapping[str, Any], *, is_waiting: bool) -> dict[str, Callable[..., Any]]:
    """Return the methods that take the places of the engine's."""

    def save_checkpoint(  # noqa: PLR0917  # DeepSpeed's signature
        self: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = {},  # noqa: B006
        save_latest: bool = True,  # noqa: FBT001, FBT002
        exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        if not _is_url(save_dir):
            return _original(self, "save_checkpoint")(
                self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )
        manager_of(_text(save_dir), **settings).save(
            self.global_steps,
            lambda: engine_state(self, client_state=client_state, exclude_frozen_parameters=exclude_frozen_parameters),
            name=f"global_step{self.global_steps}" if tag is None else str(tag),
            exist_ok=True,
            wait=is_waiting,
        )
        return True

    def load_checkpoint(  # noqa: PLR0917  # DeepSpeed's signature
        self: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,  # noqa: FBT001, FBT002
        load_optimizer_states: bool = True,  # noqa: FBT001, FBT002
        load_lr_scheduler_states: bool = True,  # noqa: FBT001, FBT002
        load_module_only: bool = False,  # noqa: FBT001, FBT002
        custom_load_fn: Any = None,
    ) -> Any:
        if not _is_url(load_dir):
            return _original(self, "load_checkpoint")(
                self,
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        return _load(
            self,
            manager_of(_text(load_dir), **settings),
            None if tag is None else str(tag),
            is_strict=load_module_strict,
            loads_optimizer=load_optimizer_states and not load_module_only,
            loads_scheduler=load_lr_scheduler_states and not load_module_only,
            is_module_only=load_module_only,
        )

    def save_16bit_model(self: Any, save_dir: Any, *arguments: Any, **options: Any) -> Any:
        if _is_url(save_dir):
            raise InvalidArgumentError(
                "save_16bit_model gathers the model and writes into a local folder. The checkpoints of save_checkpoint "
                "have the weights: dcp_remote.load(url, keys='model.*', dtype=torch.bfloat16) reads them.",
                save_dir=_text(save_dir),
            )
        return _original(self, "save_16bit_model")(self, save_dir, *arguments, **options)

    methods: dict[str, Callable[..., Any]] = {
        "save_checkpoint": save_checkpoint,
        "load_checkpoint": load_checkpoint,
        "save_16bit_model": save_16bit_model,
    }
    for name, method in methods.items():
        original: Callable[..., Any] = _originals.get(name) or getattr(DeepSpeedEngine, name)
        functools.update_wrapper(method, original)
        setattr(method, _MARK, True)
    return methods


def _original(engine: Any, name: str) -> Callable[..., Any]:
    """Return DeepSpeed's own method in place of the one of `enable`, or that of a subclass."""
    method: Callable[..., Any] = getattr(type(engine), name)
    return inspect.unwrap(method) if getattr(method, _MARK, False) else method


def _load(
    engine: Any,
    manager: CheckpointManager,
    tag: str | None,
    *,
    is_strict: bool,
    loads_optimizer: bool,
    loads_scheduler: bool,
    is_module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    state = engine_state(engine, is_strict=is_strict)
    part: EngineState = state["deepspeed"]
    part.is_setting_counters = not is_module_only
    if not loads_optimizer:
        state.pop("optim", None)
    elif isinstance(state.get("optim"), _OptimizerParts):
        state["optim"].is_required = True
    if not loads_scheduler:
        state.pop("scheduler", None)
    step = manager.restore(
        state,
        int(tag) if tag is not None and tag.isdecimal() else tag,
        unexpected="ignore",
        dtype="convert",
        # Weights alone are taken from another run, or from an older step, without going back to it.
        go_on=not is_module_only,
    )
    if step is None:
        return None, None
    return f"{manager.url}/{tag or step}", part.client_state


def _is_url(folder: Any) -> bool:
    return is_remote(folder) or (isinstance(folder, str) and folder.startswith("file:"))


def _text(folder: Any) -> str:
    return os.fspath(folder) if isinstance(folder, os.PathLike) else str(folder)


def _require_supported(engine: Any) -> None:
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


# ---- the parts of the state


class _ModelState:
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
                names=", ".join(unexpected[:_NAMES_SHOWN_MAX]),
            )
        return values

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Copy the masters, which were read in place, into the parameters of the module; a collective in ZeRO."""
        module = self._engine.module
        current = {canonical(name): value for name, value in module.state_dict().items()}
        extra = {}
        for name, value in values.items():
            if isinstance(value, LocalBoxes):
                continue
            if not isinstance(value, torch.Tensor):
                extra[name] = value
            elif isinstance(current.get(name), torch.Tensor) and current[name].data_ptr() != value.data_ptr():
                current[name].copy_(value)
        for path, child in module.named_modules():
            name = canonical(f"{path}._extra_state".lstrip("."))
            if name in extra:
                child.set_extra_state(extra[name])
        if has_layout(self._engine):
            read_layout(self._engine).refresh()


class _OptimizerParts:
    """State of the base optimizer, whose parameters are flat partitions, under the names of the parameters.

    Every parameter of a partition has the partition's step. A `Stateful`.

    Attributes:
        is_required: True if a restore refuses a checkpoint without an optimizer.
    """

    def __init__(self, engine: Any) -> None:
        """Keep the engine."""
        self._engine = engine
        self.is_required = False

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts; before the first step no parameter has a state, and none is made.

        Raises:
            InvalidArgumentError: A state has another shape than the masters, as that of an 8-bit optimizer.
        """
        layout = read_layout(self._engine)
        state: dict[str, dict[str, Any]] = {}
        for partition in layout.partitions:
            flat_state = layout.optimizer.state.get(partition.masters) or {}
            shaped, steps = {}, {}
            for key, value in flat_state.items():
                if isinstance(value, torch.Tensor) and value.shape == partition.masters.shape:
                    shaped[key] = value
                else:
                    steps[key] = _to_scalar(key, value, partition.masters.shape)
            for fragment in partition.fragments if flat_state else ():
                state[fragment.name] = {key: fragment.boxes_in(value) for key, value in shaped.items()} | steps
        return {"state": state, "param_groups": self._groups(layout)}

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values to load into; states are made if the checkpoint has them and the optimizer does not.

        Raises:
            StateMismatchError: The checkpoint has no optimizer, and `is_required` is true.
            InvalidArgumentError: The optimizer cannot make its state before its first step.
        """
        if self.is_required and not names:
            raise StateMismatchError(
                "The checkpoint has no state of the optimizer; nothing was loaded. To load the rest, pass "
                "load_optimizer_states=False."
            )
        layout = read_layout(self._engine)
        saved = {name.removeprefix("state.").rpartition(".")[0] for name in names if name.startswith("state.")}
        own = [fragment.name for partition in layout.partitions for fragment in partition.fragments]
        states: dict[str, Any] = {}
        if not saved.isdisjoint(own):
            for partition in layout.partitions:
                _make_state(layout.optimizer, partition.masters, partition.group)
            states = self.state_dict()["state"]
        lacking = [name for name in states if name not in saved]
        if lacking:
            logger.warning("the checkpoint has no optimizer state of %s", ", ".join(lacking[:_NAMES_SHOWN_MAX]))
        # A number of its own for each parameter, since each is read.
        states = {
            name: {key: value if isinstance(value, LocalBoxes) else value.clone() for key, value in state.items()}
            for name, state in states.items()
            if name in saved
        }
        groups: dict[int, dict[str, Any]] = {}
        for number, key in _split_groups(names):
            known = layout.optimizer.param_groups
            value = known[number].get(key) if number < len(known) and key != "params" else None
            groups.setdefault(number, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
        numbers = range(max(groups, default=-1) + 1)
        return {"state": states, "param_groups": [groups.get(number, {}) for number in numbers]}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set steps and options of the groups; the other states were read in place."""
        layout = read_layout(self._engine)
        for partition in layout.partitions:
            flat_state = layout.optimizer.state.get(partition.masters) or {}
            saved = [
                values["state"][fragment.name] for fragment in partition.fragments if fragment.name in values["state"]
            ]
            for key, value in flat_state.items():
                if isinstance(value, torch.Tensor) and value.shape == partition.masters.shape:
                    continue
                found = [state[key] for state in saved if key in state]
                if found:
                    flat_state[key] = _like(
                        value, max(found, key=float), key=key, count=len({float(one) for one in found})
                    )
        groups = values["param_groups"]
        group_of = {name: number for number, group in enumerate(groups) for name in group.get("params") or ()}
        for number, group in enumerate(layout.optimizer.param_groups):
            names = self._names(layout, number)
            saved_number = next((group_of[name] for name in names if name in group_of), None)
            if saved_number is None:
                continue
            options = {key: value for key, value in groups[saved_number].items() if key != "params"}
            for key, value in options.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _groups(self, layout: Layout) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"} | {"params": self._names(layout, number)}
            for number, group in enumerate(layout.optimizer.param_groups)
        ]

    def _names(self, layout: Layout, group: int) -> list[str]:
        return [
            fragment.name
            for partition in layout.partitions
            if partition.group == group
            for fragment in partition.fragments
        ]


def _to_scalar(key: str, value: Any, shape: Any) -> torch.Tensor:
    """Return a state that all elements of a partition have in common, such as the step, as torch's optimizers have it.

    Raises:
        InvalidArgumentError: This is no number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value))
    raise InvalidArgumentError(
        "A state of the optimizer is neither of the shape of its flat partition nor a number, so it cannot be split by "
        "parameters. Use another optimizer, or DeepSpeed's own checkpoints in a local folder.",
        state=key,
        type=type(value).__qualname__,
        shape=tuple(value.shape) if isinstance(value, torch.Tensor) else None,
        partition=tuple(shape),
    )


def _like(current: Any, value: torch.Tensor, *, key: str, count: int) -> Any:
    """Return a loaded number in the form in which the optimizer keeps it."""
    if count > 1:
        logger.warning(
            "parameters of one flat partition have %d different values of %s: the largest, %g, counts for all of them",
            count,
            key,
            float(value),
        )
    if isinstance(current, torch.Tensor):
        return current.copy_(value)
    return type(current)(float(value))


def _split_groups(names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield number and key of each option of a group; of a nested option its first key."""
    seen = set()
    for name in names:
        first, _, rest = name.partition(".")
        number, _, key = rest.partition(".")
        found = (int(number) if number.isdecimal() else -1, key.partition(".")[0])
        if first == "param_groups" and found[0] >= 0 and found not in seen:
            seen.add(found)
            yield found


def _make_state(optimizer: Any, masters: torch.Tensor, group: int) -> None:
    """Make the state of a partition that has none, by a step with zero gradients and a learning rate of zero.

    Raises:
        InvalidArgumentError: The optimizer cannot make such a step.
    """
    if optimizer.state.get(masters):
        return
    groups, gradient = optimizer.param_groups, masters.grad
    rate = groups[group].get("lr", 0.0)
    zero = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        masters.grad = torch.zeros_like(masters)
        optimizer.param_groups = [groups[group] | {"params": [masters], "lr": zero}]
        with torch.no_grad():
            optimizer.step()
        assert optimizer.state.get(masters), "the step has made no state"
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidArgumentError(
            "The state of this optimizer cannot be made before its first step, and there is nothing to load into. Make "
            "a step before load_checkpoint, or pass load_optimizer_states=False.",
            optimizer=type(optimizer).__qualname__,
            cause=error,
        ) from error
    finally:
        optimizer.param_groups, masters.grad = groups, gradient


class _Scheduler:
    """State of a scheduler, of which a restore takes what the checkpoint has. A `Stateful`."""

    def __init__(self, scheduler: Any) -> None:
        """Keep the scheduler."""
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        return dict(self._scheduler.state_dict())

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values to load into; none if the checkpoint has no scheduler."""
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
    """

    def __init__(self, engine: Any, client_state: Mapping[str, Any] | None = None) -> None:
        """Keep the engine."""
        self._engine = engine
        self.client_state: dict[str, Any] = dict(client_state or {})
        self.is_setting_counters = True

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the engine."""
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
        self.client_state = {}
        return _pick(self.state_dict(), names)

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
