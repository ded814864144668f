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
import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from dcp_remote import CheckpointManager, Opaque, is_remote, open_run, refused_values
from dcp_remote.errors import InvalidArgumentError, UnsafeObjectError
from dcp_remote.integrations.deepspeed_state import EngineState, engine_state, require_supported
from dcp_remote.integrations.entries import keep_only, leave_out_unused
from dcp_remote.integrations.folders import RemoteFolders, name_of
from dcp_remote.integrations.runs import can_repeat, framework_words, manager_of, note_step, require_settings

__all__ = ["EngineState", "attach", "disable", "enable", "engine_state"]

# Attribute of the methods that `attach` and `enable` set.
_MARK = "_dcp_remote"

_STRICT = "load_module_strict=False leaves alone what checkpoint or module lack"
_WORDS = {
    "restore": "engine.load_checkpoint(url) before the first save goes on from the newest checkpoint",
    "start_over": "attach(engine, start_over=True) leaves the checkpoints behind",
    "exist_ok": "each engine of a job saves to a run of its own",
    "missing": _STRICT,
    "unexpected": _STRICT,
    "exclude": "load_optimizer_states=False, load_lr_scheduler_states=False and load_module_only=True load the rest; "
    "CheckpointManager.restore(engine_state(engine), exclude=…, rename=…) chooses values",
    "replicas": "attach(engine, replicas='coordinator') saves those of the lowest rank",
}

_VALUES_SHOWN_MAX = 5

# Files of every checkpoint of DeepSpeed, in the folder of its tag.
_OWN_FILES = "*/*_states.pt"

# The methods as DeepSpeed has them, while `enable` is in force.
_originals: dict[str, Callable[..., Any]] = {}


# ---- what users call


def attach(engine: Any, *, wait: bool = False, **settings: Any) -> None:
    """Make an engine's `save_checkpoint` and `load_checkpoint` take URLs; both go on taking local folders.

    Signatures and results are DeepSpeed's. The URL is that of a run; the step of a checkpoint is `engine.global_steps`,
    and `tag` is a name of the checkpoint, by default `global_step<n>`. Every rank calls both methods. A second save of
    this engine in the same step uploads nothing, and only adds its tag; that of another engine is refused.
    `load_checkpoint` without a tag takes the newest checkpoint, and returns `(None, None)` if there is none, with a
    warning; of one without counters, as another framework's, `global_steps` becomes the step. `save_latest` and
    `custom_load_fn` have no effect, and `save_16bit_model` refuses URLs, because it would make a local folder of that
    name.

    A save copies this rank's partitions into memory that is kept for the next save, and returns when all ranks have;
    a rank that raises, or does not come within 30 s, is an error on all of them. Upload and commit go on in the
    background; their error is raised by the next save or load, by `runs.close_managers()`, or at the end of the
    process. After a kill at any moment the run has the checkpoints that it had, and perhaps the new one, each whole.
    Memory and requests: see `CheckpointManager.save`; no collective of torch is called in a save.

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
    require_supported(engine)
    require_settings(settings)
    for name, method in _methods(settings, None, is_waiting=wait).items():
        setattr(engine, name, MethodType(method, engine))


def enable(url: str | None = None, *, wait: bool = False, **settings: Any) -> None:
    """Do as `attach` for every engine of this process, also those that Transformers, Accelerate or Lightning make.

    With `url`, folders go to object storage as well, each to a run of its own: `save_checkpoint("out/actor", tag)`
    saves to the run `<url>/actor`, and `load_checkpoint("out/actor")` loads from there. A local folder of this path is
    made with a note alone. A folder that DeepSpeed itself has saved is loaded as before. An engine that is not
    supported is refused when it is made. All folders stay local once a Trainer saves to this URL.

    Once more, with other settings, replaces them. `disable` undoes this.

    Args:
        url: URL below which folders are saved; None leaves folders local.
        wait: See `attach`.
        settings: See `attach`.
    """
    require_settings(settings)
    disable()
    folders = RemoteFolders(url) if url is not None else None
    methods = _methods(settings, folders, is_waiting=wait)
    if folders is not None:
        methods["__init__"] = _refuse_at_start(folders)
    for name, method in methods.items():
        _originals.setdefault(name, getattr(DeepSpeedEngine, name))
        setattr(DeepSpeedEngine, name, method)


def disable() -> None:
    """Give all engines DeepSpeed's own methods again; those of `attach` stay."""
    for name, method in _originals.items():
        setattr(DeepSpeedEngine, name, method)
    _originals.clear()


# ---- the methods of the engine


def _methods(
    settings: Mapping[str, Any], folders: RemoteFolders | None, *, is_waiting: bool
) -> dict[str, Callable[..., Any]]:
    """Return the methods that take the places of the engine's."""

    @framework_words(_WORDS)
    def save_checkpoint(  # noqa: PLR0917  # DeepSpeed's signature
        self: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = {},  # noqa: B006  # DeepSpeed's default; never changed here
        save_latest: bool = True,  # noqa: FBT001, FBT002  # DeepSpeed's signature
        exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002  # DeepSpeed's signature
    ) -> Any:
        place = _place_of(save_dir, tag, folders, is_saved=True)
        if place is None:
            return _original(self, "save_checkpoint")(
                self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )
        url, tag = place
        manager = manager_of(url, **settings)
        step = self.global_steps
        # A save without the frozen parameters does not stand for one with them.
        owners = {"trained" if exclude_frozen_parameters else "engine": self}

        def make_state() -> dict[str, Any]:
            if not settings.get("allow_pickle"):
                _require_plain(client_state)
            return engine_state(self, client_state=client_state, exclude_frozen_parameters=exclude_frozen_parameters)

        manager.save(
            step,
            make_state,
            name=f"global_step{step}" if tag is None else str(tag),
            exist_ok=can_repeat(manager.url, step, **owners),
            wait=is_waiting or "begun",
        )
        note_step(manager.url, step, **owners)
        if folders is not None and not _is_url(save_dir):
            folders.leave_note(save_dir, writes=self.local_rank <= 0)
        return True

    @framework_words(_WORDS)
    def load_checkpoint(  # noqa: PLR0917  # DeepSpeed's signature
        self: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,  # noqa: FBT001, FBT002  # DeepSpeed's signature
        load_optimizer_states: bool = True,  # noqa: FBT001, FBT002  # DeepSpeed's signature
        load_lr_scheduler_states: bool = True,  # noqa: FBT001, FBT002  # DeepSpeed's signature
        load_module_only: bool = False,  # noqa: FBT001, FBT002  # DeepSpeed's signature
        custom_load_fn: Any = None,
    ) -> Any:
        load_own = functools.partial(
            _original(self, "load_checkpoint"),
            self,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        place = _place_of(load_dir, tag, folders, is_saved=False)
        if place is None:
            return load_own()
        url, tag = place
        manager = manager_of(url, **settings)
        loaded = _load(
            self,
            manager,
            None if tag is None else str(tag),
            is_strict=load_module_strict,
            loads_optimizer=load_optimizer_states and not load_module_only,
            loads_scheduler=load_lr_scheduler_states and not load_module_only,
            is_module_only=load_module_only,
        )
        if loaded[0] is None and _is_url(load_dir):
            _refuse_checkpoint_url(manager.url, settings)
        # A folder's run is empty if nothing was committed yet since the training moved to object storage.
        return loaded if loaded[0] is not None or _is_url(load_dir) else load_own()

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


def _place_of(folder: Any, tag: Any, folders: RemoteFolders | None, *, is_saved: bool) -> tuple[str, Any] | None:
    """Return the URL of the run, and the tag, of a checkpoint; None if it lies in a local folder."""
    if _is_url(folder):
        return _text(folder), tag
    if folders is None or not (folders.is_active if is_saved else folders.stands_for(folder, files=_OWN_FILES)):
        return None
    return folders.run_url_of(folder, is_saved=is_saved), None if tag is None else name_of(str(tag))


def _refuse_at_start(folders: RemoteFolders) -> Callable[..., Any]:
    """Return a constructor that refuses an engine which is not supported, so that the first save does not."""
    own = DeepSpeedEngine.__init__

    @functools.wraps(own)
    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        own(self, *arguments, **options)
        if folders.is_active:
            require_supported(self)

    return construct


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
    for key, is_loaded in (("optim", loads_optimizer), ("scheduler", loads_scheduler)):
        if not is_loaded:
            state.pop(key, None)
        elif hasattr(state.get(key), "is_required"):
            state[key].is_required = True
    step = manager.restore(
        state,
        int(tag) if tag is not None and tag.isdecimal() else tag,
        # Keys that are not asked for, such as `optim`, or `files` of a Trainer, are left out without a warning.
        rename=leave_out_unused(state, keep_only(*state)),
        unexpected="ignore",
        dtype="convert",
        # Weights alone are taken from another run, or from an older step, without going back to it.
        go_on=not is_module_only,
    )
    if step is None:
        return None, None
    if not (is_module_only or part.has_counters):
        part.count_from(step)
    if not is_module_only:
        note_step(manager.url, step, engine=engine)
    return f"{manager.url}/{tag or step}", part.client_state


def _require_plain(client_state: Mapping[str, Any] | None) -> None:
    """Refuse values that cannot be stored in the call, on all ranks, and not when the upload has begun.

    Raises:
        UnsafeObjectError: There is such a value; names them.
    """
    refused = refused_values({"client_state": Opaque(dict(client_state or {}))})
    if refused:
        raise UnsafeObjectError(
            "client_state holds values that only code could load; nothing was saved. Store their fields.",
            values="; ".join(f"{value.path} ({value.type_name})" for value in refused[:_VALUES_SHOWN_MAX]),
            refused=len(refused),
        )


def _refuse_checkpoint_url(url: str, settings: Mapping[str, Any]) -> None:
    """Refuse a URL with a run one level up: a training that begins at a checkpoint's URL would lose its state.

    Costs one GET on each rank, only where there is no checkpoint at the URL.
    """
    run_url, _, name = url.rpartition("/")
    options = {"storage_options": settings["storage_options"]} if "storage_options" in settings else {}
    if run_url.count("/") > 2 and open_run(run_url, **options).latest() is not None:  # noqa: PLR2004  # s3://bucket has two
        raise InvalidArgumentError(
            "This is the URL of a checkpoint in a run. Pass the run as load_dir, and the name as tag.",
            load_dir=run_url,
            tag=name,
        )


def _is_url(folder: Any) -> bool:
    return is_remote(folder) or (isinstance(folder, str) and folder.startswith("file:"))


def _text(folder: Any) -> str:
    return os.fspath(folder) if isinstance(folder, os.PathLike) else str(folder)


# ---- changes of DeepSpeed itself, made when this module is imported


def _refuse_urls(name: str) -> Callable[..., Any]:
    """Return a method that refuses URLs: DeepSpeed's own takes them for local folders, which it makes, or misses."""
    own = getattr(DeepSpeedEngine, name)

    @functools.wraps(own)
    def refusing(self: Any, *arguments: Any, **options: Any) -> Any:
        folder = arguments[0] if arguments else options.get("save_dir", options.get("load_dir"))
        if _is_url(folder):
            raise InvalidArgumentError(
                "This engine takes local folders alone. Call dcp_remote.integrations.deepspeed.attach(engine) first.",
                url=_text(folder),
            )
        return own(self, *arguments, **options)

    setattr(refusing, _MARK, True)
    return refusing


for _name in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
    setattr(DeepSpeedEngine, _name, _refuse_urls(_name))
