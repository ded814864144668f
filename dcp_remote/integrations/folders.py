"""Folders of a program that stand for checkpoints in object storage: `out/step_100` is `<URL>/step_100`.

For programs that `python -m dcp_remote.launch` starts, which save to folders themselves. A local folder of the same
path, which holds nothing but a note, lets the program find the names of its checkpoints by listing folders.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
from pathlib import Path
from typing import Any

from dcp_remote import open_run
from dcp_remote.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

# File in a local folder that stands for a checkpoint in object storage.
NOTE = "dcp_remote.txt"

# Beginning of the names of checkpoints whose folder has a name that no checkpoint of a run may have: digits alone are
# taken for a step, and these words for the newest checkpoint. Also of a folder whose name begins so itself.
_PREFIX = "folder-"
_RESERVED = re.compile(r"\d+|latest|last|folder-.*", re.DOTALL)

# Of a longer path, the name of the checkpoint holds a digest and the end; names have 200 characters at most.
_PATH_CHARACTERS_MAX = 200
_END_CHARACTERS = 150

# URLs of runs to which a Trainer saves: its run holds no checkpoints of others.
_of_trainers: set[str] = set()


def leave_to_trainer(url: str) -> None:
    """Note that a Trainer saves to this run, so that folders stay local; its exports are such folders."""
    _of_trainers.add(url.rstrip("/"))


def name_of(folder_name: str) -> str:
    """Return the name of the checkpoint that a folder of some name stands for."""
    return f"{_PREFIX}{folder_name}" if _RESERVED.fullmatch(folder_name) else folder_name


def path_name_of(folder: Any) -> str:
    """Return the path of a folder: the name that its checkpoint has beside `name_of`, and no other folder's has."""
    path = str(_absolute(folder))
    if len(path) <= _PATH_CHARACTERS_MAX:
        return path
    return f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}/{path[-_END_CHARACTERS:]}"


class RemoteFolders:
    """Folders of one process that stand for what is below a URL.

    Args:
        url: URL of the run.

    Attributes:
        url: The same, without a slash at the end.
    """

    def __init__(self, url: str) -> None:
        """Begin with no folder; no request."""
        self.url = url.rstrip("/")
        self._paths: dict[str, Path] = {}  # saved ones, by URL of the run
        self._step = -1

    @property
    def is_active(self) -> bool:
        """True if folders go to object storage: not once a Trainer saves to this run."""
        return self.url not in _of_trainers

    def stands_for(self, folder: Any, *, files: str) -> bool:
        """Return whether a folder that a program loads stands for a checkpoint, and is none of the framework's own.

        Args:
            folder: Path as the program gives it; None is no folder.
            files: Pattern of files in a checkpoint of the framework.
        """
        if folder is None or not self.is_active:
            return False
        path = _absolute(folder)
        return (path / NOTE).exists() or next(path.glob(files), None) is None

    def url_of(self, folder: Any) -> str:
        """Return the URL of a folder's checkpoint, or run, by the last part of the path.

        Raises:
            InvalidArgumentError: The path has no last part.
        """
        path = _absolute(folder)
        if not path.name:
            raise InvalidArgumentError("This folder has no name. Save to a folder below it.", folder=str(path))
        return f"{self.url}/{name_of(path.name)}"

    def run_url_of(self, folder: Any, *, is_saved: bool) -> str:
        """Return the URL of a folder's run.

        Args:
            folder: Path as the program gives it.
            is_saved: True for a folder that is saved, False for one that is loaded.

        Raises:
            InvalidArgumentError: This process has saved another folder of the same name.
        """
        url, path = self.url_of(folder), _absolute(folder)
        other = self._paths.setdefault(url, path) if is_saved else self._paths.get(url, path)
        if other != path:
            raise InvalidArgumentError(
                "A folder is saved below the URL under the last part of its path, which must be another one for each "
                "folder. Rename one of the two.",
                folder=str(path),
                other=str(other),
                url=self.url,
            )
        return url

    def saved_url_of(self, folder: Any, **options: Any) -> str:
        """Return the URL of the checkpoint that was saved from a folder, by its step. One to three requests.

        Where none was, as after a move to another folder of outputs, return that of the folder whose path ends most
        like this one, the newest of several; else the URL of a checkpoint of the folder's name. A warning says that
        another folder's checkpoint is returned, or that another folder of the same name was saved later.

        Args:
            folder: Path as the program gives it.
            options: Keyword arguments of `open_run`.
        """
        path_name = path_name_of(folder)
        found = [
            (not info.abandoned, info.step, name)
            for info in open_run(self.url, **options).checkpoints()
            for name in info.names
            if "/" in name and _common_parts(path_name, name)
        ]
        if not found:
            return self.url_of(folder)
        newest = max(found)
        _, step, name = max(found, key=lambda one: (_common_parts(path_name, one[2]), *one))
        if (step, name) != (newest[1], path_name):
            logger.warning(
                "%s: step %d of %s is loaded, saved from %s. The newest of a folder of this name is step %d, from %s",
                *(path_name, step, self.url, name, *newest[1:]),
            )
        return f"{self.url}/{step}"

    def next_step(self, folder: Any) -> int:
        """Return the step of a checkpoint to save: the number at the end of the folder's name, if steps ascend then.

        Else, as for `epoch_0` after `step_500`, and for `best`, the number after the last step.
        """
        number = re.search(r"\d{1,15}\Z", _absolute(folder).name)
        return max(self._step + 1, int(number[0]) if number is not None else 0)

    def note_step(self, step: int) -> None:
        """Note the step that was saved, or loaded."""
        self._step = step

    def leave_note(self, folder: Any, *, writes: bool = True) -> None:
        """Make the local folder of a committed checkpoint; a failure is logged.

        Args:
            folder: Path as the program gives it.
            writes: True on one rank of a host, which writes the note.
        """
        path = _absolute(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if writes:
                text = "Saved in object storage by dcp_remote; this folder stands for"
                (path / NOTE).write_text(f"{text} {self.url_of(path)}\n", encoding="utf-8")
        except OSError as error:
            logger.warning("%s is in object storage, but its local folder cannot be made: %s", path, error)

    def find(self, parent: Any, *, writes: bool, **options: Any) -> None:
        """Make the local folders of a run's checkpoints, which a program on a new host lists. One to three requests.

        Args:
            parent: Folder in which the program keeps its checkpoints.
            writes: As in `leave_note`.
            options: Keyword arguments of `open_run`.
        """
        for info in open_run(self.url, **options).checkpoints():
            names = [name.removeprefix(_PREFIX) for name in info.names if not info.abandoned]
            for name in names:
                path = _absolute(Path(parent, name))
                # A name may be any text, also a path that leads elsewhere.
                if path == _absolute(parent) / path.name and path.name == name and not path.exists():
                    self.leave_note(path, writes=writes)


def _common_parts(path: str, other: str) -> int:
    """Return how many parts two paths have in common at their ends."""
    pairs = zip(reversed(Path(path).parts), reversed(Path(other).parts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _absolute(folder: Any) -> Path:
    return Path(os.path.abspath(os.path.expanduser(folder)))  # noqa: PTH100, PTH111  # `resolve` follows links
