"""Checkpoints that Lightning has removed: names are taken, and checkpoints without one are deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dcp_remote import CheckpointManager
from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.runs import CheckpointPath

logger = logging.getLogger(__name__)


class Removals:
    """Removals of one trainer, carried out by rank 0 once the checkpoint that replaces the removed one is committed.

    Args:
        manager_of: Function that returns the manager of a run by its URL.
    """

    def __init__(self, manager_of: Callable[[str], CheckpointManager]) -> None:
        """Begin without any."""
        self._manager_of = manager_of
        self._removed: list[CheckpointPath] = []
        # URLs of runs, and steps of checkpoints that have lost a name, or lose it to the save that is under way.
        self._unnamed: set[tuple[str, int]] = set()
        self._failed_saves: dict[str, int] = {}  # by URL of the run

    def add(self, path: CheckpointPath) -> None:
        """Note that Lightning has removed a name."""
        self._removed.append(path)

    def carry_out(self, saved: CheckpointPath | None = None, step: int | None = None) -> None:
        """Take the names, and delete checkpoints without one, but the newest. Raise nothing: what fails is tried again.

        Only rank 0 calls this, so that an error would stop it alone, while nothing is lost by a checkpoint that stays.

        Args:
            saved: Run and name of the checkpoint that is saved next; other checkpoints lose this name.
            step: Step of this checkpoint.
        """
        try:
            self._carry_out()
            if saved is not None:
                infos = self._manager_of(saved.run_url).run.checkpoints()
                holders = {info.step for info in infos if saved.checkpoint in info.names and info.step != step}
                self._unnamed |= {(saved.run_url, holder) for holder in holders}
        except DcpRemoteError:
            logger.warning("Checkpoints that Lightning has removed stay until the next save.", exc_info=True)

    def _keep_what_failed_saves_replace(self) -> None:
        """Forget what a save was to replace that has failed, and let the job go on (`on_error="warn"`)."""
        for run_url in {path.run_url for path in self._removed} | {run_url for run_url, _ in self._unnamed}:
            failed_saves = self._manager_of(run_url).failed_saves
            if failed_saves > self._failed_saves.get(run_url, 0):
                self._failed_saves[run_url] = failed_saves
                self._removed = [path for path in self._removed if path.run_url != run_url]
                self._unnamed = {one for one in self._unnamed if one[0] != run_url}

    def _carry_out(self) -> None:
        self._keep_what_failed_saves_replace()
        while self._removed:
            path = self._removed[0]
            manager = self._manager_of(path.run_url)
            info = next((one for one in manager.run.checkpoints() if path.checkpoint in one.names), None)
            if info is not None:
                self._unnamed.add((path.run_url, info.step))
                manager.run.unname(str(path.checkpoint))
            del self._removed[0]
        for run_url, step in sorted(self._unnamed):
            manager = self._manager_of(run_url)
            info = next((one for one in manager.run.checkpoints() if one.step == step and not one.abandoned), None)
            if info == manager.run.latest():
                continue
            self._unnamed.discard((run_url, step))
            if info is not None and not info.names and not info.pinned:
                manager.run.delete(step)
