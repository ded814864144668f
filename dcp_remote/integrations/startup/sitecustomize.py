"""Started by Python itself in each process of `python -m dcp_remote.run`: enables integrations when they are needed.

Waits until the program imports a framework, and enables the framework's integration then. Other processes import
nothing of dcp_remote. A `sitecustomize` of the environment runs as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parent)


def _enable_transformers() -> None:
    from dcp_remote.integrations import transformers

    resumes = os.environ["DCP_REMOTE_RESUME"] != "never"
    transformers.enable(os.environ["DCP_REMOTE_URL"], resume=resumes, storage_options=_storage_options())


def _enable_accelerate() -> None:
    from dcp_remote.integrations import accelerate

    accelerate.enable(storage_options=_storage_options())


def _enable_deepspeed() -> None:
    from dcp_remote.integrations import deepspeed

    deepspeed.enable(storage_options=_storage_options())


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
    "llamafactory.v1.core.utils.checkpoint": _refuse_llamafactory_v1,
}


class _EnablingLoader(Loader):
    """Loader that enables an integration when a module was imported.

    Args:
        loader: Loader of the module.
        enable: Enables the integration.
    """

    def __init__(self, loader: Loader, enable: Callable[[], None]) -> None:
        self._loader, self._enable = loader, enable

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._enable()
        Path(os.environ["DCP_REMOTE_MARKS"], f"{os.getpid()}-{module.__name__}").touch()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # what inspect and pkgutil ask of a loader


class _Finder(MetaPathFinder):
    """Finder of the modules in `_ENABLE`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        enable = _ENABLE.get(name)
        spec = PathFinder.find_spec(name, path, target) if enable is not None else None
        if enable is not None and spec is not None and spec.loader is not None:
            spec.loader = _EnablingLoader(spec.loader, enable)
        return spec


def _storage_options() -> dict[str, object] | None:
    options: dict[str, object] = json.loads(os.environ.get("DCP_REMOTE_STORAGE_OPTIONS") or "{}")
    return options or None


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this one hides."""
    path = [folder for folder in sys.path if folder != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "DCP_REMOTE_URL" in os.environ and "DCP_REMOTE_MARKS" in os.environ:
    sys.meta_path.insert(0, _Finder())
_run_next_sitecustomize()
