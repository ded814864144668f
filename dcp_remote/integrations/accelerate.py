"""Accelerate: `save_state` and `load_state` with object storage in place of folders.

    save_state(accelerator, "s3://bucket/run/step-100")
    load_state(accelerator, "s3://bucket/run")

Or `enable()`, after which `accelerator.save_state` and `accelerator.load_state` take such URLs; with `enable(url)` also
folders, as of programs that cannot be changed: `out/step-100` is `<url>/step-100`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from dcp_remote import ModelState, Opaque, PerRank, RandomStates, Retention, is_remote
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations import runs
from dcp_remote.integrations.entries import leave_out
from dcp_remote.integrations.folders import RemoteFolders, path_name_of
from dcp_remote.integrations.runs import framework_words
from dcp_remote.integrations.wrappers import one_or_named, replaces, training_parts, unwrap_optimizer

logger = logging.getLogger(__name__)

# Entries of a checkpoint beside those of `training_state`.
ABOUT_KEY = "accelerate"
LOADERS_KEY = "loaders"

_SUPPORTED = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "FSDP", "DEEPSPEED"})


_WORDS = {
    "restore": "load_state(<URL of the run>) before the first save goes on from the newest checkpoint",
    "start_over": "save_state(…, start_over=True) leaves the checkpoints behind",
    "overwrite": "save_state(…, overwrite=True) replaces it",
    "exclude": "load_state(…, weights_only=True) loads models alone",
    "replicas": "save_state(…, replicas='coordinator') saves those of the lowest rank",
}


@framework_words(_WORDS)
def save_state(
    accelerator: Accelerator,
    url: str,
    step: int | None = None,
    *,
    wait: bool = False,
    overwrite: bool = False,
    names: Sequence[str] = (),
    **settings: Any,
) -> str | None:
    """Save the state of an accelerator in the background, as one checkpoint of a run; every rank calls this.

    Saved are all models, optimizers, schedulers and data loaders that `prepare` has returned, the scaler, the random
    states of each rank, the objects of `register_for_checkpointing`, and the accelerator's count of steps: one commit,
    without a gather. Requests, and what survives a crash, are as of `CheckpointManager.save`.

    Args:
        accelerator: Accelerator.
        url: URL of the checkpoint: that of the run, and a name, such as `s3://bucket/run/step-100`.
        step: Number of finished steps, which ascends from one checkpoint of the run to the next; None is the number at
            the end of the name.
        wait: True to return only when the checkpoint is committed. False to return when every rank has copied its
            state; an error of the upload is raised by the next call, or when the process ends.
        overwrite: True to replace a checkpoint of the same step. Without it a second save of a step, before the next
            step of an optimizer, uploads nothing, and only adds its name.
        names: Further names of the checkpoint.
        settings: Keyword arguments of `CheckpointManager` for the run, such as `retention` and `storage_options`.

    Returns:
        The URL; None if the save was left out (`when_busy`), or failed before this function returned (`on_error`).

    Raises:
        InvalidArgumentError: The URL names no checkpoint in a run, its name ends in no number and there is no `step`,
            or the accelerator has hooks that write files, or is of an unsupported kind.
        CheckpointExistsError: The run has checkpoints that this job has not loaded, or another state of this step; see
            `CheckpointManager.save`, also for other errors.
    """
    path = runs.split_path(url)
    if step is None:
        number = re.search(r"\d+\Z", str(path.checkpoint))
        if number is None:
            raise InvalidArgumentError(
                "A checkpoint has a step: end its name in the number of finished steps, as step-100, or pass step=.",
                url=url,
            )
        step = int(number[0])
    _require_supported(accelerator, accelerator._save_model_state_pre_hook)
    is_begun = runs.save_step(
        path.run_url,
        step,
        lambda: _saved_state(accelerator),
        settings=settings,
        owners=_owners_of(accelerator),
        name=(str(path.checkpoint), *names),
        overwrite=overwrite,
        wait=wait,
    )
    accelerator.project_configuration.iteration += 1
    return url if is_begun else None


@framework_words(_WORDS)
def load_state(accelerator: Accelerator, url: str, *, weights_only: bool = False, **settings: Any) -> int:
    """Load a checkpoint into all that an accelerator has prepared, in place; every rank calls this.

    A checkpoint of another framework gives model, optimizer, schedulers and random states; data loaders stay as they
    are, and registered objects are refused. The number of ranks may be another than that of the save. Then ranks that
    saved no random states keep their own, and the position of a stateful data loader, which counts batches of a rank,
    is left out with a warning.

    Costs one to four requests per rank to find the checkpoint, and those of two calls of `CheckpointManager.restore`.

    Args:
        accelerator: Accelerator, after `prepare` and `register_for_checkpointing`.
        url: URL of a run, for its newest checkpoint, or of a checkpoint in a run.
        weights_only: True to load models alone, with dtypes converted; the checkpoint may be another framework's. The
            next save does not go on from there.
        settings: Keyword arguments of `CheckpointManager` for the run.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; lists those of the run.
        StateMismatchError: The checkpoint has other entries than the accelerator; see `CheckpointManager.restore`.
        InvalidArgumentError: Another number of objects or data loaders was saved than there are, or the accelerator has
            hooks that read files, or is of an unsupported kind.
    """
    runs.wait_for_saves()
    path = runs.find_checkpoint(url, **runs.storage_of(settings))
    _require_supported(accelerator, accelerator._load_model_state_pre_hook)
    if weights_only:
        models = [ModelState(model) for model in accelerator._models]
        model = (
            _engine_state(accelerator)["model"] if _kind_of(accelerator) == "DEEPSPEED" else one_or_named(models) or {}
        )
        return runs.load_weights(path, model, settings)
    manager = runs.manager_of(path.run_url, **settings)
    # First, since a checkpoint of another framework has none of these, and may yet have all that is trained.
    about, positions = runs.read_own(manager, path.checkpoint, ABOUT_KEY, LOADERS_KEY)
    is_own, state = about is not None, _training(accelerator)
    _require_same_objects(accelerator, about or {"custom": [], "loaders": accelerator._dataloaders}, url)
    if not is_own:
        # Left out are such as options of groups, in which frameworks put parameters of different weight decay.
        step = runs.restore_existing(manager, state, path.checkpoint, unexpected="ignore")
        logger.warning("%s: step %d was not saved by Accelerate: data loaders stay as they are", manager.url, step)
        return step
    rename = leave_out(state, ABOUT_KEY, LOADERS_KEY)
    step = runs.restore_existing(manager, state, path.checkpoint, rename=rename)
    _apply(accelerator, about, positions, url)
    runs.note_step(path.run_url, step, **_owners_of(accelerator))
    return step


def enable(url: str | None = None, **settings: Any) -> None:
    """Make `Accelerator.save_state` and `load_state` take URLs of object storage; folders work as before.

    Without this they refuse URLs, which Accelerate alone takes for paths of local folders. An accelerator whose
    `project_dir` is a URL saves with `automatic_checkpoint_naming` to the run `<project_dir>/checkpoints`, and keeps
    `total_limit` checkpoints. `save_state(url, step=…)` passes a step on.

    With `url`, folders go to object storage as well: `save_state("out/step_100")` saves the checkpoint `<url>/step_100`
    and returns when it is committed, and `load_state("out/step_100")` loads it from there, for up to three requests
    more on each rank to find what was saved from this path. A local folder of this path is made with a note alone; for
    the checkpoints of a run also by an accelerator with a `project_dir`, which costs up to three requests on each rank,
    so that programs which list folders find them on a new host. A folder that
    Accelerate itself has saved is loaded as before. The step is the number at the end of the name; where steps would
    not ascend, that after the last one. An accelerator of an unsupported kind, and hooks that write files, are refused
    before the training. All folders stay local once a Trainer saves to this run.

    Args:
        url: URL of the run for folders; None leaves folders local.
        settings: Keyword arguments of `CheckpointManager` for all runs.
    """
    global _settings, _folders  # read when a method of an accelerator is called
    runs.require_settings(settings)
    _settings, _folders = settings, RemoteFolders(url) if url is not None else None


def disable() -> None:
    """Let `Accelerator.save_state` and `load_state` refuse URLs again; folders are local ones."""
    global _settings, _folders  # read when a method of an accelerator is called
    _settings, _folders = None, None


# ---- the state


def _training(accelerator: Any) -> dict[str, Any]:
    """Return the state of models, optimizers, schedulers, scaler and random states; the same to save and to load."""
    engine = _engine_state(accelerator) if _kind_of(accelerator) == "DEEPSPEED" else {}
    schedulers = [one for one in accelerator._schedulers if type(one).__name__ != "DeepSpeedSchedulerWrapper"]
    return training_parts(
        engine,
        models=accelerator._models,
        optimizers=_optimizers(accelerator),
        schedulers=[] if "scheduler" in engine else schedulers,
        scaler=accelerator.scaler,
        random_states=RandomStates(),
    )


def _optimizers(accelerator: Any) -> list[Any]:
    return [unwrap_optimizer(optimizer) for optimizer in accelerator._optimizers]


def _engine_state(accelerator: Any) -> dict[str, Any]:
    from dcp_remote.integrations.deepspeed import engine_state

    if len(accelerator._models) != 1:
        raise InvalidArgumentError(
            "An accelerator with DeepSpeed is saved with one model. Save each engine by "
            "dcp_remote.integrations.deepspeed.attach(engine).",
            models=len(accelerator._models),
        )
    return engine_state(accelerator._models[0])


def _kind_of(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def _owners_of(accelerator: Any) -> dict[str, Any]:
    """Return the optimizers, whose steps tell whether two saves are of one state, and the accelerator."""
    optimizers = _optimizers(accelerator)
    own = {"accelerator": accelerator} if optimizers else {}
    return own | {str(number): optimizer for number, optimizer in enumerate(optimizers)}


def _saved_state(accelerator: Any) -> dict[str, Any]:
    about = {
        "step": accelerator.step,
        "iteration": accelerator.project_configuration.iteration,
        "world_size": accelerator.num_processes,
        "loaders": [_loader_state(loader) for loader in accelerator._dataloaders],
        "custom": [value.state_dict() for value in accelerator._custom_objects],
    }
    positions = [loader.state_dict() if _is_stateful(loader) else None for loader in accelerator._dataloaders]
    state = {**_training(accelerator), LOADERS_KEY: PerRank(Opaque(positions))}
    # Of an object that several ranks give, any rank's may be stored; as in Accelerate, the main process's is.
    return state | {ABOUT_KEY: Opaque(about)} if accelerator.is_main_process else state


def _require_same_objects(accelerator: Any, about: Mapping[str, Any], url: str) -> None:
    """Refuse a checkpoint with other numbers of registered objects and data loaders than an accelerator has."""
    for name, own in (("custom", accelerator._custom_objects), ("loaders", accelerator._dataloaders)):
        if len(about[name]) != len(own):
            raise InvalidArgumentError(
                "The checkpoint has another number of these than the accelerator; nothing was loaded. Prepare and "
                "register the same ones, or pass weights_only=True.",
                url=url,
                of="registered objects" if name == "custom" else "data loaders",
                saved=len(about[name]),
                here=len(own),
            )


def _apply(accelerator: Any, about: Mapping[str, Any], positions: Sequence[Any] | None, url: str) -> None:
    """Set what was loaded, but for what `restore` has set itself."""
    for value, saved in zip(accelerator._custom_objects, about["custom"], strict=True):
        value.load_state_dict(saved)
    for loader, saved in zip(accelerator._dataloaders, about["loaders"], strict=True):
        _load_loader(loader, saved)
    accelerator.step = about["step"]
    accelerator.project_configuration.iteration = about["iteration"] + 1
    has_positions = any(_is_stateful(loader) for loader in accelerator._dataloaders)
    if has_positions and about["world_size"] != accelerator.num_processes:
        logger.warning(
            "%s: was saved by %d ranks and is loaded by %d: stateful data loaders begin anew. Use skip_first_batches.",
            *(url, about["world_size"], accelerator.num_processes),
        )
    elif has_positions and positions is not None:
        for loader, position in zip(accelerator._dataloaders, positions, strict=True):
            if _is_stateful(loader) and position is not None:
                loader.load_state_dict(position)


def _loader_state(loader: Any) -> dict[str, Any]:
    """Return the epoch of a data loader, and how its sampler shuffles; equal on all ranks."""
    sampler = _sampler_of(loader)
    generator = getattr(sampler, "generator", None)
    return {
        "iteration": getattr(loader, "iteration", None),
        "epoch": getattr(sampler, "epoch", None),
        "seed": getattr(sampler, "initial_seed", None),
        "generator": generator.get_state() if generator is not None else None,
    }


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of a data loader, also below the batches of one of several processes; None if it has none."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    shared = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)  # of Accelerate's BatchSamplerShard
    return getattr(shared, "sampler", None) if sampler is None else sampler


def _load_loader(loader: Any, saved: Mapping[str, Any]) -> None:
    sampler = _sampler_of(loader)
    if saved["iteration"] is not None and hasattr(loader, "iteration"):
        loader.iteration = saved["iteration"]
    for name, value in (("epoch", saved["epoch"]), ("initial_seed", saved["seed"])):
        if value is not None and hasattr(sampler, name):
            setattr(sampler, name, value)
    generator = getattr(sampler, "generator", None)
    if saved["generator"] is not None and generator is not None:
        generator.set_state(saved["generator"])


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _require_supported(accelerator: Any, hooks: Mapping[Any, Any]) -> None:
    kind = _kind_of(accelerator)
    if kind not in _SUPPORTED:
        raise InvalidArgumentError("Accelerators of this kind are not supported.", distributed_type=kind)
    if hooks:
        raise InvalidArgumentError(
            "Hooks of register_save_state_pre_hook and register_load_state_pre_hook work on files of a local folder, "
            "which does not exist here. Remove the hooks, and register objects by register_for_checkpointing.",
            hooks=", ".join(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks.values()),
        )


def _require_no_options(options: Mapping[str, Any], *arguments: Any) -> None:
    """Refuse options of the functions that write and read files."""
    unknown = sorted(options.keys() - _ABOUT_FILES)
    if unknown or any(arguments):
        raise InvalidArgumentError(
            "save_state to and load_state from object storage take no options of the functions for folders.",
            options=", ".join(unknown) or "load_kwargs",
        )


def _require_no_urls(instead: str, *arguments: Any) -> None:
    """Refuse URLs, which Accelerate's own methods take for local folders."""
    urls = [value for value in arguments if is_remote(value)]
    if urls:
        raise InvalidArgumentError(f"Accelerate would take this URL for a local folder. {instead}", url=urls[0])


def _retention_of(accelerator: Any) -> dict[str, Any]:
    limit = accelerator.project_configuration.total_limit
    return {} if limit is None else {"retention": Retention(keep_last=limit, keep_named=False)}


def _automatic_folder(accelerator: Any) -> str | None:
    """Return the folder, or the URL of the run, in which `automatic_checkpoint_naming` saves; None without it."""
    if not accelerator.project_configuration.automatic_checkpoint_naming or accelerator.project_dir is None:
        return None
    folder = str(accelerator.project_dir)
    return f"{folder.rstrip('/')}/checkpoints" if folder else "checkpoints"


# ---- changes of Accelerate itself, made when this module is imported

# Files that each rank writes into every checkpoint of Accelerate.
_OWN_FILES = "random_states_*.pkl"

# Arguments of `save_state` and `load_state` about the files in a folder, which has none here.
_ABOUT_FILES = frozenset({"safe_serialization", "map_location"})

_INSTEAD = "Call save_state and load_state of dcp_remote.integrations.accelerate, or its enable() first."

# Settings of `enable`, and folders that stand for checkpoints; None without.
_settings: Mapping[str, Any] | None = None
_folders: RemoteFolders | None = None


def _remote_folders() -> RemoteFolders | None:
    return _folders if _folders is not None and _folders.is_active else None


@replaces(Accelerator, "save_state")
def _save(save: Any, self: Any, output_dir: Any = None, *args: Any, step: int | None = None, **kwargs: Any) -> Any:
    folders, automatic = _remote_folders(), _automatic_folder(self)
    if automatic is not None and (folders is not None or (_settings is not None and is_remote(automatic))):
        output_dir = f"{automatic}/checkpoint_{self.project_configuration.iteration}"
    is_folder = not is_remote(output_dir)
    if _settings is None or (is_folder and folders is None):
        _require_no_urls(_INSTEAD, output_dir, *args, *kwargs.values())
        if step is not None:
            kwargs["step"] = step  # may be an option of the function that saves the model
        return save(self, output_dir, *args, **kwargs)
    _require_no_options(kwargs)
    options = _settings if automatic is None else {**_retention_of(self), **_settings}
    if not is_folder or folders is None:
        return save_state(self, str(output_dir), step, **options)
    step = folders.next_step(output_dir) if step is None else step
    # Committed when the folder is there: of a folder that is found after a kill there is a checkpoint.
    save_state(self, folders.url_of(output_dir), step, wait=True, names=(path_name_of(output_dir),), **options)
    folders.note_step(step)
    folders.leave_note(output_dir, writes=self.is_local_main_process)
    return str(output_dir)


@replaces(Accelerator, "load_state")
def _load(load: Any, self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    folders, run_url = _remote_folders(), _automatic_folder(self)
    if run_url is not None and not is_remote(run_url):
        run_url = folders.url if folders is not None else None
    url = run_url if input_dir is None else input_dir
    is_folder = not is_remote(url) and (url is None or url != run_url)
    if _settings is None or (is_folder and (folders is None or not folders.stands_for(input_dir, files=_OWN_FILES))):
        _require_no_urls(_INSTEAD, input_dir, *args, *kwargs.values())
        return load(self, input_dir, *args, **kwargs)
    _require_no_options(kwargs, *args)
    if is_folder and folders is not None:
        url = folders.saved_url_of(input_dir, **runs.storage_of(_settings))
    # The manager of the run that is saved to afterwards, which cannot be given a retention then.
    keeps = _retention_of(self) if run_url is not None and f"{url}/".startswith(f"{run_url}/") else {}
    step = load_state(self, str(url), **{**keeps, **_settings})
    if folders is not None:
        folders.note_step(step)
    return None


@replaces(Accelerator, "save_model")
def _save_model(save: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    instead = "save_state saves to object storage; upload the exported model by other means."
    _require_no_urls(instead, *args, *kwargs.values())
    return save(self, *args, **kwargs)


@replaces(Accelerator, "__init__")
def _init(construct: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    construct(self, *args, **kwargs)
    folders = _remote_folders()
    if folders is None:
        return
    _require_supported(self, {})
    parent = _automatic_folder(self) or self.project_dir
    if parent is not None and not is_remote(parent):
        folders.find(parent, writes=self.is_local_main_process, **runs.storage_of(_settings or {}))


@replaces(Accelerator, "register_save_state_pre_hook")
@replaces(Accelerator, "register_load_state_pre_hook")
def _register(register: Any, self: Any, hook: Any) -> Any:
    """Refuse a hook when the program registers it, and not at the first save."""
    if _remote_folders() is not None:
        _require_supported(self, {"hook": hook})
    return register(self, hook)
