"""Temporary folder of a process, which a later process removes if this one is killed."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from dcp_remote.common.mounts import swap_refusal

logger = logging.getLogger(__name__)


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """Folder that is removed with this object, or at the end of the process, and is locked until then.

    Making one also removes the folders of this user with the same prefix that no process holds locked: those of
    processes that were killed. The kernel releases a lock when its process ends, in whatever container. On a file
    system that is not known to lock between all processes that see it, no other folder is removed. The folder lies in
    `tempfile.gettempdir()`.
    """

    def __init__(self, prefix: str) -> None:
        """Remove the folders of killed processes; make and lock a new one."""
        _remove_abandoned(tempfile.gettempdir(), prefix)
        while True:
            super().__init__(prefix=prefix, ignore_cleanup_errors=True)
            # A process that starts now may remove the folder before it is locked.
            with suppress(FileNotFoundError):
                descriptor = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, descriptor)
                with suppress(OSError):  # no locks here, and so none that another process can take
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(descriptor), Path(self.name).stat()):
                    return
            self.cleanup()


def _remove_abandoned(parent: str, prefix: str) -> None:
    if swap_refusal(parent):
        return
    made = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")  # as `tempfile` names folders
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if made.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed the temporary folder of a process that was killed: %s", path)
    finally:
        os.close(descriptor)
