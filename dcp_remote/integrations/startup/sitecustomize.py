"""Started by Python itself in each process of `python -m dcp_remote.launch`: enables integrations when they are needed.

Waits until the program imports a framework, and enables the framework's integration then. Other processes import
nothing of dcp_remote. An integration that cannot be enabled is reported when the framework is imported and when the
process ends; the program goes on without it. A `sitecustomize` of the environment takes the place of this one.

Runs before the folder of the program is on the path: imports what Python itself has imported or has built in, and
nothing else, since the program may have modules of the same names.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# Name under which this module stays, since `sitecustomize` is that of the environment.
__name__ = "dcp_remote_startup"
sys.modules[__name__] = sys.modules["sitecustomize"]


def _enable_transformers() -> None:
    from dcp_remote.integrations import transformers

    resumes = os.environ.get("DCP_REMOTE_RESUME") != "never"
    transformers.enable(_url(), resume=resumes, storage_options=_storage_options())


def _enable_accelerate() -> None:
    from dcp_remote.integrations import accelerate

    accelerate.enable(_url(), storage_options=_storage_options())


def _enable_deepspeed() -> None:
    from dcp_remote.integrations import deepspeed

    deepspeed.enable(_url(), storage_options=_storage_options())


def _enable_llamafactory() -> None:
    from dcp_remote.integrations import llamafactory

    llamafactory.enable()


def _refuse_llamafactory_v1() -> None:
    from dcp_remote.integrations import llamafactory

    llamafactory.refuse_v1()


# By the module that is complete when the framework can be imported from: packages import their own parts first.
_ENABLE: dict[str, Callable[[], None]] = {
    "transformers.trainer": _enable_transformers,
    "accelerate": _enable_accelerate,
    "deepspeed": _enable_deepspeed,
    "llamafactory.train.tuner": _enable_llamafactory,
}
# Modules that save by means which no integration reaches: their import ends the program, before the training.
_REFUSE: dict[str, Callable[[], None]] = {"llamafactory.v1.core.utils.checkpoint": _refuse_llamafactory_v1}


class _Finder:
    """Finder of the modules in `_ENABLE` and `_REFUSE`, by the finders that stand behind it in `sys.meta_path`."""

    def __init__(self) -> None:
        # Finders of other packages may ask for the same module by `importlib.util.find_spec`, which comes here again.
        self._calls: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        call = _thread.get_ident(), name
        if (name not in _ENABLE and name not in _REFUSE) or call in self._calls:
            return None
        self._calls.add(call)
        try:
            spec = self._find_behind(name, path, target)
        finally:
            self._calls.discard(call)
        if spec is not None and spec.loader is not None:
            # Set on the loader itself, which stays what inspect, pkgutil and copies take it for.
            try:
                import functools

                own = spec.loader.exec_module
                spec.loader.exec_module = functools.partial(_execute, own)  # type: ignore[method-assign]
            except (AttributeError, ImportError) as error:
                _report(name, error)
        return spec

    def _find_behind(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
        return next((spec for spec in specs if spec is not None), None)


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module by its loader, then enable the integration of its framework."""
    execute(module)
    name = module.__name__
    if name in _REFUSE and _is_set():
        _REFUSE[name]()
    if name not in _ENABLE:
        return
    try:
        if not _is_set():
            raise LookupError("DCP_REMOTE_URL is not set in this process: pass DCP_REMOTE_* on with PYTHONPATH.")
        _ENABLE[name]()
    except Exception as error:  # noqa: BLE001  # the program works without the integration
        _report(name, error)
    else:
        _leave_mark(f"{os.getpid()}-{name}", "")


def _report(name: str, error: Exception) -> None:
    """Say that the integration of a framework is not enabled: now, at the end of the process, and to the launcher."""
    url = os.environ.get("DCP_REMOTE_URL", "the run")
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    text = (
        f"dcp_remote: process {os.getpid()} saves nothing of {name.partition('.')[0]} to {url}, since the integration "
        f"could not be enabled. {cause}"
    )
    _say(text)
    atexit.register(_say, text)
    _leave_mark(f"{os.getpid()}-{name}.failed", text)


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # absent, as in a process without a console, or closed
        pass


def _leave_mark(name: str, text: str) -> None:
    """Leave a file for the launcher; its folder is gone when the launcher has ended, and absent on another host."""
    folder = os.environ.get("DCP_REMOTE_MARKS")
    if folder:
        try:
            from pathlib import Path

            Path(folder, name).write_text(text, encoding="utf-8")
        except (ImportError, OSError):
            pass


def _is_set() -> bool:
    return bool(os.environ.get("DCP_REMOTE_URL"))


def _url() -> str:
    return os.environ["DCP_REMOTE_URL"]


def _storage_options() -> dict[str, object] | None:
    import json

    options: dict[str, object] = json.loads(os.environ.get("DCP_REMOTE_STORAGE_OPTIONS") or "{}")
    return options or None


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this one hides, and leave the name to it."""
    # Those behind this folder alone: before it lies that of another installation of dcp_remote, which came here.
    folder = os.path.dirname(__file__)  # noqa: PTH120  # pathlib is not to be imported
    spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index(folder) + 1 :] if folder in sys.path else [])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder())
_run_next_sitecustomize()
