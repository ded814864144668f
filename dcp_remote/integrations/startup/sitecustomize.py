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


# Integration to enable, by the module that is complete when the framework can be imported from: packages import their
# own parts first.
_ENABLE = {
    "transformers.trainer": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "llamafactory.train.tuner": "llamafactory",
}
# Module that saves by means which no integration reaches: its import ends the program, before the training.
_REFUSED = "llamafactory.v1.core.utils.checkpoint"


class _Finder:
    """Finder of the modules in `_ENABLE`, and of `_REFUSED`, by the finders that stand behind it in `sys.meta_path`."""

    def __init__(self) -> None:
        # Finders of other packages may ask for the same module by `importlib.util.find_spec`, which comes here again.
        self._calls: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        call = _thread.get_ident(), name
        if (name not in _ENABLE and name != _REFUSED) or call in self._calls:
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
    name, url = module.__name__, os.environ.get("DCP_REMOTE_URL")
    if name == _REFUSED:
        if url:
            from dcp_remote.integrations import llamafactory

            llamafactory.refuse_v1()
        return
    try:
        if not url:
            raise LookupError("DCP_REMOTE_URL is not set in this process: pass DCP_REMOTE_* on with PYTHONPATH.")
        _enable(_ENABLE[name], url)
    except Exception as error:  # noqa: BLE001  # the program works without the integration
        _report(name, error)
    else:
        _leave_mark(f"{os.getpid()}-{name}", "")


def _enable(name: str, url: str) -> None:
    """Enable an integration with the settings that the launcher has put into the environment."""
    import importlib
    import json

    integration = importlib.import_module(f"dcp_remote.integrations.{name}")
    if name == "llamafactory":  # which saves by Transformers' Trainer
        integration.enable()
        return
    resuming = {"resume": os.environ.get("DCP_REMOTE_RESUME") != "never"} if name == "transformers" else {}
    options = json.loads(os.environ.get("DCP_REMOTE_STORAGE_OPTIONS") or "{}") or None
    integration.enable(url, **resuming, storage_options=options)


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
