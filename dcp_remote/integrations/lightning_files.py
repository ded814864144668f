"""Checkpoints of runs as `ModelCheckpoint` sees them: as files of a folder, whose path is the URL of the run.

Importing this module lets `ModelCheckpoint(dirpath="s3://bucket/run")` and `ckpt_path="last"` work without a file
system of fsspec for the scheme.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from lightning.pytorch.callbacks import model_checkpoint
from lightning.pytorch.trainer.connectors import checkpoint_connector

from dcp_remote import CheckpointInfo, is_remote, open_run
from dcp_remote.errors import CheckpointNotFoundError, InvalidArgumentError
from dcp_remote.integrations.wrappers import replaces

# Keyword arguments of `open_run`; those of the strategy that was made last, since `ModelCheckpoint` knows of none.
open_options: dict[str, Any] = {}

# Names that this process has given and taken, by URL of the run: those of a save in the background are not listed yet.
_given: dict[str, dict[str, bool]] = {}


def to_url(path: Any) -> str:
    """Return the URL of a path; gives back the slash that `os.path.normpath` has taken from `s3://`."""
    return re.sub(r"^([a-z0-9]+):/(?!/)", r"\1://", str(path)).rstrip("/")


def run_of(callback: Any) -> str | None:
    """Return the URL of the run to which a callback saves; None if that is a local folder."""
    url = to_url(callback.dirpath or "")
    return url if is_remote(url) else None


def note_name(run_url: str, name: str, *, is_given: bool) -> None:
    """Note that this process gives a name to a checkpoint, or takes it."""
    _given.setdefault(run_url, {})[name] = is_given


def adopt_last(trainer: Any, states: Mapping[str, Any]) -> None:
    """Let `ModelCheckpoint` give the name `last.ckpt` to later checkpoints, also after its first save.

    The state of that save was copied before the name was given, so that Lightning would give `last-v1.ckpt`.

    Args:
        trainer: Trainer that resumes.
        states: States of callbacks, as they were loaded; changed in place.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        is_own = isinstance(callback, model_checkpoint.ModelCheckpoint) and run_of(callback) is not None
        if state is not None and is_own and not state["last_model_path"] and state["dirpath"] == callback.dirpath:
            state["last_model_path"] = callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST)


class RunFiles:
    """Checkpoints of runs as files; stands for a file system of fsspec, with the methods that Lightning calls.

    A path is the URL of a run, or of a checkpoint in it by its name, such as `s3://bucket/run/epoch=3-step=500.ckpt`.
    Methods cost one GET, and two requests more where there is no run.
    """

    def exists(self, path: Any) -> bool:
        """Return whether there is a run or a checkpoint at this URL, or one is being saved by this process."""
        run_url, _, name = to_url(path).rpartition("/")
        given = _given.get(run_url, {}).get(name)
        return given if given is not None else self._find(run_url, name) is not None or self.isdir(path)

    def isdir(self, path: Any) -> bool:
        """Return whether there is a run with checkpoints at this URL."""
        return bool(self._checkpoints(to_url(path)))

    def isfile(self, path: Any) -> bool:
        """Return whether there is a checkpoint at this URL."""
        return self.exists(path) and not self.isdir(path)

    def ls(self, path: Any, *, detail: bool = False) -> list[str]:
        """Return the URLs of the checkpoints of a run that have a name."""
        assert not detail, "Lightning asks for names alone"
        url = to_url(path)
        return [f"{url}/{name}" for info in self._checkpoints(url) for name in info.names]

    def modified(self, path: Any) -> datetime:
        """Return the time at which a checkpoint was committed.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
        """
        run_url, _, name = to_url(path).rpartition("/")
        info = self._find(run_url, name)
        if info is None:
            raise CheckpointNotFoundError("There is no checkpoint of this name.", url=run_url, name=name)
        return datetime.fromisoformat(info.created)

    def open(self, path: Any, *_arguments: object, **_options: object) -> Any:
        """Refuse to open a file: a run holds checkpoints alone.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError("A run holds no files of their own. Give a local path.", url=to_url(path))

    def _find(self, run_url: str, name: str) -> CheckpointInfo | None:
        return next((info for info in self._checkpoints(run_url) if name in info.names), None)

    def _checkpoints(self, url: str) -> list[CheckpointInfo]:
        if not is_remote(url) or url.count("/") < 3:  # noqa: PLR2004  # s3://bucket/run has three
            return []
        return [info for info in open_run(url, **open_options).checkpoints() if not info.abandoned]


@replaces(model_checkpoint, "get_filesystem")
@replaces(checkpoint_connector, "get_filesystem")
def _get_filesystem(get_own: Any, path: Any, **options: Any) -> Any:
    return RunFiles() if is_remote(to_url(path)) else get_own(path, **options)
