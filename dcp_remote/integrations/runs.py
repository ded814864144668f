"""Runs by the paths of frameworks: `s3://bucket/run/checkpoint-500` is the checkpoint `checkpoint-500` of a run."""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from dcp_remote import CheckpointManager, Opaque, PerRank, is_remote, open_run
from dcp_remote.errors import CheckpointNotFoundError, DcpRemoteError, InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.entries import keep_only

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Checkpoint as a framework names it.

    Attributes:
        run_url: URL of the run.
        checkpoint: Name or step of the checkpoint; None is the newest one of the run.
    """

    run_url: str
    checkpoint: str | int | None


class RankValue(PerRank[T]):
    """Value of this rank of which the framework says itself that a checkpoint lacks it, as a position in the data."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """Manager of a run, and the process group and settings with which it was made."""

    manager: CheckpointManager
    group: object
    settings: dict[str, Any]


_lock = threading.Lock()
_opened: dict[str, _Opened] = {}
# Words of the frameworks that were called, for errors of saves that nobody waits for until the managers close.
_words: dict[str, str] = {}
# Step that was last saved to, or loaded from, a run; and the objects whose state that is, by URL of the run.
_last: dict[str, tuple[int, Mapping[str, Any]]] = {}
# Steps of each optimizer that owns a state, counted since it was first seen here.
_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def manager_of(run_url: str, **settings: Any) -> CheckpointManager:
    """Return this process's manager of a run: the same one as long as the process group is the same.

    A framework has no object that could hold a manager from one save to the next. The manager closes when the process
    ends, or by `close_managers`; it waits for its last save then.

    Args:
        run_url: URL of the run.
        settings: Keyword arguments of `CheckpointManager`, the same in each call; those of the first call count where
            a later call passes none. A manager that has saved and loaded nothing yet takes new ones.

    Raises:
        InvalidArgumentError: A setting differs from that of the open manager, which is in use, or is wrong. No request
            is sent.
    """
    url = run_url.rstrip("/")
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    with _lock:
        opened = _opened.get(url)
        if opened is not None and opened.group is group:
            other = [name for name, value in settings.items() if opened.settings.get(name) != value]
            if not other:
                return opened.manager
            opened.manager.wait()
            if opened.manager.last_save is not None or opened.manager.last_load is not None:
                raise InvalidArgumentError(
                    "This run is open with other settings, and in use: pass these in the first call, which is perhaps "
                    "a load.",
                    url=run_url,
                    settings=", ".join(other),
                )
            settings = opened.settings | settings
        if opened is not None:  # unused, or of a process group that was destroyed
            opened.manager.close()
        _opened[url] = _Opened(CheckpointManager(url, **settings), group, settings)
        return _opened[url].manager


def require_settings(settings: Mapping[str, Any], *, listens: bool = False) -> None:
    """Refuse keyword arguments that `CheckpointManager` does not have; warn of those without effect in the framework.

    With `listens`, `notice_seconds` has an effect: the integration saves and stops after SIGTERM.

    Raises:
        InvalidArgumentError: There is such an argument; names a similar one.
    """
    known = list(inspect.signature(CheckpointManager).parameters)[1:]  # without the URL
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise InvalidArgumentError(
                "CheckpointManager has no such setting.", setting=name, near=near[0] if near else None
            )
    for name in ("save_policy",) if listens else ("save_policy", "notice_seconds"):
        if settings.get(name) is not None:
            logger.warning("%s has no effect here: the framework decides when to save, and does not ask for it", name)


def storage_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a manager that `open_run` takes as well."""
    return {name: value for name, value in settings.items() if name == "storage_options"}


@contextmanager
def framework_words(words: Mapping[str, str]) -> Iterator[None]:
    """Let errors name what the user of a framework can pass, in place of arguments of `CheckpointManager`.

    Args:
        words: Texts by the name of an argument, as of `DcpRemoteError.advice`.
    """
    _words.update(words)
    try:
        yield
    except DcpRemoteError as error:
        error.reword(words)
        raise


def close_managers() -> None:
    """Wait for the last save of each run, and close the managers; raise the first error of a save.

    Every rank calls this, as `CheckpointManager.close`. Managers that are not closed here close when the process ends.
    """
    with _lock:
        opened = list(_opened.values())
        _opened.clear()
        _last.clear()
    errors = []
    for one in opened:
        try:
            with framework_words(_words):
                one.manager.close()
        except Exception as error:  # noqa: BLE001  # the other runs are closed as well
            errors.append(error)
    if errors:
        raise errors[0]


def note_step(run_url: str, step: int, **owners: Any) -> None:
    """Note that the state of some objects was saved as a step of a run, or loaded from there.

    Args:
        run_url: URL of the run.
        step: Step of the checkpoint.
        owners: Objects by any name; kept as weak references.
    """
    _last[run_url.rstrip("/")] = step, _states_of(owners)


def can_repeat(run_url: str, step: int, **owners: Any) -> bool:
    """Return whether a save of these objects may keep a checkpoint that this process has at the step: `exist_ok`.

    False where the checkpoint is perhaps that of other objects, such as a second engine that saves to the same run, or
    where an optimizer among them has made a step since: with `exist_ok` nothing of them would be saved. Without objects
    a step is never repeated.
    """
    last_step, last_states = _last.get(run_url.rstrip("/"), (-1, {}))
    states = _states_of(owners)
    return step > last_step or (step == last_step and bool(states) and states == last_states)


def _states_of(owners: Mapping[str, Any]) -> dict[str, tuple[weakref.ref[Any], int]]:
    """Return each object, and the steps that it has made; 0 unless it is an optimizer."""
    for owner in owners.values():
        if isinstance(owner, Optimizer) and owner not in _steps:
            _steps[owner] = 0
            owner.register_step_post_hook(_count_step)
    return {name: (weakref.ref(owner), _steps.get(owner, 0)) for name, owner in owners.items()}


def _count_step(optimizer: Optimizer, *_: object) -> None:
    _steps[optimizer] += 1


def save_step(
    run_url: str,
    step: int,
    make_state: Callable[[], Mapping[str, Any]],
    *,
    settings: Mapping[str, Any],
    owners: Mapping[str, Any],
    watched: Iterable[Any] = (),
    **options: Any,
) -> bool:
    """Save a state by the manager of a run; a second save of the same state uploads nothing, and adds its name.

    Returns what `CheckpointManager.save` returns: False if the save was left out, or has failed and the job goes on.

    Args:
        run_url: URL of the run.
        step: Step of the checkpoint.
        make_state: Function that returns the state, called once all ranks have come.
        settings: Keyword arguments of `CheckpointManager`.
        owners: Objects whose state is saved, as for `can_repeat`.
        watched: Optimizers for `CheckpointManager.watch`.
        options: Keyword arguments of `CheckpointManager.save`; without `wait` it returns when all ranks have copied
            their state, or begun to, so that a rank that fails before is heard of.
    """
    exist_ok = not options.get("overwrite") and can_repeat(run_url, step, **owners)
    options["wait"] = options.get("wait") or "begun"
    manager = manager_of(run_url, **settings)
    for optimizer in watched:
        manager.watch(optimizer)
    skipped_saves = manager.skipped_saves
    is_begun = manager.save(step, make_state, exist_ok=exist_ok, **options)
    if is_begun:
        note_step(run_url, step, **owners)
    is_main = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
    if manager.skipped_saves > skipped_saves and is_main:
        # Frameworks have no return value for this, and the manager logs the first one alone.
        logger.warning(
            "%s: the save of step %d was left out (name: %s), since another is under way. Before a save that must not "
            "be, call dcp_remote.integrations.runs.wait_for_saves() on all ranks.",
            *(run_url, step, options.get("name")),
        )
    return is_begun


def is_torchs(optimizer: object) -> bool:
    """Return whether an optimizer is one of torch, which changes what it owns in its `step` alone.

    Others may do so before the step, as schedule-free ones, or in the backward pass.
    """
    return type(optimizer).__module__.startswith("torch.optim.")


def read_own(
    manager: CheckpointManager, checkpoint: str | int | None, shared_key: str, rank_key: str
) -> tuple[Any, Any]:
    """Return the two values that one framework alone saves: that of all ranks, and this rank's; None for one not saved.

    Every rank calls this. Costs what `CheckpointManager.restore` costs; changes nothing of the run.

    Args:
        manager: Manager of the run.
        checkpoint: Name or step; None is the newest.
        shared_key: Key of the `Opaque` value of all ranks.
        rank_key: Key of the `Opaque` value of each rank.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
    """
    shared, own = Opaque[Any](None), Opaque[Any](None)
    state: dict[str, Any] = {shared_key: shared, rank_key: RankValue(own)}
    with suppress(StateMismatchError):  # raised where no entry at all would be read
        manager.restore(state, checkpoint, rename=keep_only(state), missing="keep", go_on=False, must_exist=True)
    return shared.value, own.value


def restore_existing(
    manager: CheckpointManager,
    state: dict[str, Any],
    checkpoint: str | int | None,
    *,
    is_strict: bool = True,
    **options: Any,
) -> int:
    """Read a checkpoint of any framework into a state, in place, and return its step; dtypes are converted.

    Args:
        manager: Manager of the run.
        state: State; entries of the checkpoint under other keys than the state's are left out.
        checkpoint: Name or step; None is the newest.
        is_strict: False to keep values that the checkpoint lacks, and to leave out those that the state lacks.
        options: Keyword arguments of `CheckpointManager.restore`; a `rename` chooses other entries.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        StateMismatchError: State and checkpoint have other entries or shapes.
    """
    lenience: dict[str, Any] = {} if is_strict else {"missing": "keep", "unexpected": "ignore"}
    options = {"rename": keep_only(state)} | lenience | options
    # Converted, since masters of DeepSpeed are fp32, whatever the dtype of the model.
    step = manager.restore(state, checkpoint, dtype="convert", must_exist=True, **options)
    assert step is not None, "must_exist"
    return step


def load_weights(path: CheckpointPath, model: Any, settings: Mapping[str, Any], **options: Any) -> int:
    """Read the weights of a checkpoint of any framework, in place, and return its step; the run is not gone on from.

    Args:
        path: Checkpoint.
        model: State of the model.
        settings: Keyword arguments of `CheckpointManager`.
        options: Keyword arguments of `CheckpointManager.restore`.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        StateMismatchError: Model and checkpoint have other names or shapes.
    """
    # A manager of its own: a save into this run may follow, with its settings.
    with CheckpointManager(path.run_url, **settings) as manager:
        state = {"model": model}
        return restore_existing(manager, state, path.checkpoint, unexpected="ignore", go_on=False, **options)


def wait_for_saves() -> None:
    """Wait until no save of this process is under way, so that what was just saved is found; raise a save's error."""
    with _lock:
        managers = [one.manager for one in _opened.values()]
    for manager in managers:
        manager.wait()


def split_path(url: str) -> CheckpointPath:
    """Split the URL of a checkpoint to save, `<run>/<name>`; no request.

    Raises:
        InvalidArgumentError: The URL has no run before the name, or is no URL.
    """
    run_url, _, name = url.rstrip("/").rpartition("/")
    if not (is_remote(url) or url.startswith("file:")) or not run_url or run_url.endswith((":", ":/")):
        raise InvalidArgumentError("This is not the URL of a checkpoint in a run: write s3://bucket/run/name.", url=url)
    return CheckpointPath(run_url, name)


def find_checkpoint(url: str, **options: Any) -> CheckpointPath:
    """Find the checkpoint that a URL names: the newest one of the run `url`, or `<run>/<name>`, or `<run>/<step>`.

    Costs one request where the URL is that of a run, else four.

    Args:
        url: URL of a run, or of a checkpoint in a run.
        options: Keyword arguments of `open_run`, as `storage_options`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; lists the names of the run, if there is one.
    """
    if open_run(url, **options).latest() is not None:
        return CheckpointPath(url.rstrip("/"), None)
    path = split_path(url)
    checkpoints = open_run(path.run_url, **options).checkpoints()
    for info in checkpoints:
        if path.checkpoint in info.names:
            return path
        if path.checkpoint == str(info.step):
            return CheckpointPath(path.run_url, info.step)
    names = ", ".join(name for info in checkpoints for name in info.names or [str(info.step)])
    raise CheckpointNotFoundError(
        "There is no checkpoint at this URL: neither a run, nor a name or step of the run one level up.",
        url=url,
        names=names or None,
    )
