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
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from dcp_remote import Opaque, is_remote, open_run, refused_values
from dcp_remote.errors import InvalidArgumentError, UnsafeObjectError
from dcp_remote.integrations import runs
from dcp_remote.integrations.deepspeed_state import EngineState, engine_state, require_supported
from dcp_remote.integrations.entries import keep_only
from dcp_remote.integrations.folders import RemoteFolders, name_of
from dcp_remote.integrations.runs import framework_words
from dcp_remote.integrations.wrappers import replaces

__all__ = ["EngineState", "attach", "disable", "enable", "engine_state"]

# Attribute of an engine that `attach` sets.
_ATTACHMENT = "_dcp_remote"

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

_INSTEAD = "This engine takes local folders alone. Call dcp_remote.integrations.deepspeed.attach(engine) first."
_NO_16BIT = (
    "save_16bit_model gathers the model and writes into a local folder. The checkpoints of save_checkpoint have the "
    "weights: dcp_remote.load(url, keys='model.*', dtype=torch.bfloat16) reads them."
)

_VALUES_SHOWN_MAX = 5

# Files of every checkpoint of DeepSpeed, in the folder of its tag.
_OWN_FILES = "*/*_states.pt"


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
    runs.require_settings(settings)
    setattr(engine, _ATTACHMENT, _Attachment(settings, None, wait))


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
    global _enabled  # noqa: PLW0603  # read when a method of an engine is called
    runs.require_settings(settings)
    _enabled = _Attachment(settings, RemoteFolders(url) if url is not None else None, wait)


def disable() -> None:
    """Let engines take local folders alone again; those of `attach` go on taking URLs."""
    global _enabled  # noqa: PLW0603  # read when a method of an engine is called
    _enabled = None


# ---- saves and loads of an engine


@dataclass(frozen=True, repr=False)  # settings may hold secrets
class _Attachment:
    """Saves and loads of engines, as one call of `attach` or `enable` sets them.

    Attributes:
        settings: Keyword arguments of `CheckpointManager`.
        folders: Folders that stand for runs; None leaves folders local.
        is_waiting: True if a save returns only when the checkpoint is committed.
    """

    settings: Mapping[str, Any]
    folders: RemoteFolders | None
    is_waiting: bool

    @framework_words(_WORDS)
    def save_checkpoint(self, engine: Any, own: Callable[[], Any], given: Mapping[str, Any]) -> Any:
        """Save to a run, or to a local folder by DeepSpeed's own method."""
        place = self._place_of(given["save_dir"], given["tag"], is_saved=True)
        if place is None:
            return own()
        url, tag = place
        step, client_state = engine.global_steps, given["client_state"]
        is_part = given["exclude_frozen_parameters"]

        def make_state() -> dict[str, Any]:
            if not self.settings.get("allow_pickle"):
                _require_plain(client_state)
            return engine_state(engine, client_state=client_state, exclude_frozen_parameters=is_part)

        is_begun = runs.save_step(
            url,
            step,
            make_state,
            settings=self.settings,
            # A save without the frozen parameters does not stand for one with them.
            owners={"trained" if is_part else "engine": engine},
            name=f"global_step{step}" if tag is None else tag,
            wait=self.is_waiting,
        )
        if is_begun and self.folders is not None and not _is_url(given["save_dir"]):
            self.folders.leave_note(given["save_dir"], writes=engine.local_rank <= 0)
        return is_begun

    @framework_words(_WORDS)
    def load_checkpoint(self, engine: Any, own: Callable[[], Any], given: Mapping[str, Any]) -> Any:
        """Load from a run, or from a local folder by DeepSpeed's own method."""
        place = self._place_of(given["load_dir"], given["tag"], is_saved=False)
        if place is None:
            return own()
        url, tag = place
        manager = runs.manager_of(url, **self.settings)
        state, is_whole = engine_state(engine, is_strict=given["load_module_strict"]), not given["load_module_only"]
        part: EngineState = state["deepspeed"]
        part.is_setting_counters = is_whole
        for key, asked in (("optim", "load_optimizer_states"), ("scheduler", "load_lr_scheduler_states")):
            if not (is_whole and given[asked]):
                state.pop(key, None)
            elif hasattr(state.get(key), "is_required"):
                state[key].is_required = True
        step = manager.restore(
            state,
            int(tag) if tag is not None and tag.isdecimal() else tag,
            # Keys that are not asked for, such as `optim`, or `files` of a Trainer, are left out without a warning.
            rename=keep_only(state),
            unexpected="ignore",
            dtype="convert",
            # Weights alone are taken from another run, or from an older step, without going back to it.
            go_on=is_whole,
        )
        if step is None and not _is_url(given["load_dir"]):
            return own()  # nothing was committed yet since the training moved to object storage
        if step is None:
            _refuse_checkpoint_url(manager.url, self.settings)
            return None, None
        if is_whole and not part.has_counters:
            part.count_from(step)
        if is_whole:
            runs.note_step(url, step, engine=engine)
        return f"{manager.url}/{tag or step}", part.client_state

    def _place_of(self, folder: Any, tag: Any, *, is_saved: bool) -> tuple[str, str | None] | None:
        """Return the URL of the run, and the tag, of a checkpoint; None if it lies in a local folder."""
        name = None if tag is None else str(tag)
        if _is_url(folder):
            return os.fspath(folder), name
        folders = self.folders
        if folders is None or not (folders.is_active if is_saved else folders.stands_for(folder, files=_OWN_FILES)):
            return None
        return folders.run_url_of(folder, is_saved=is_saved), name and name_of(name)


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
    is_run = run_url.count("/") > 2  # noqa: PLR2004  # s3://bucket has two
    if is_run and open_run(run_url, **runs.storage_of(settings)).latest() is not None:
        raise InvalidArgumentError(
            "This is the URL of a checkpoint in a run. Pass the run as load_dir, and the name as tag.",
            load_dir=run_url,
            tag=name,
        )


def _is_url(folder: Any) -> bool:
    return is_remote(folder) or (isinstance(folder, str) and folder.startswith("file:"))


# ---- changes of DeepSpeed itself, made when this module is imported

# Attachment of `enable`, for engines that have none of `attach`.
_enabled: _Attachment | None = None


def _replace(name: str) -> None:
    """Replace a method by one that takes URLs by the engine's attachment, or refuses them.

    DeepSpeed's own method would make a local folder of a URL, or miss it.
    """
    signature = inspect.signature(getattr(DeepSpeedEngine, name))

    @replaces(DeepSpeedEngine, name)
    def method(own: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        bound = signature.bind(self, *arguments, **options)
        bound.apply_defaults()
        given = bound.arguments
        call_own = functools.partial(own, self, *arguments, **options)
        attachment = vars(self).get(_ATTACHMENT, _enabled)
        act = getattr(attachment, name, None)
        if act is not None:
            return act(self, call_own, given)
        folder: Any = given.get("save_dir", given.get("load_dir"))
        if _is_url(folder):
            raise InvalidArgumentError(_INSTEAD if attachment is None else _NO_16BIT, url=os.fspath(folder))
        return call_own()


for _name in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
    _replace(_name)


@replaces(DeepSpeedEngine, "__init__")
def _init(construct: Any, self: Any, *arguments: Any, **options: Any) -> None:
    """Make an engine; refuse one whose first save to a URL would be refused."""
    construct(self, *arguments, **options)
    if _enabled is not None and _enabled.folders is not None and _enabled.folders.is_active:
        require_supported(self)
