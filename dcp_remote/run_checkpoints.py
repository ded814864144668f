"""The checkpoints of a run as any one process sees them: asked for and pinned, without the other ranks. No torch."""

from __future__ import annotations

from typing import Any

from dcp_remote.catalog import pinned
from dcp_remote.catalog_store import swap
from dcp_remote.checkpoint import read_manifest
from dcp_remote.run import CheckpointInfo, catalog_of
from dcp_remote.run_save import require_step
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.retrying import Deadline

# Of a catalog, when somebody waits for the answer.
_LOOK_SECONDS = 300.0


class RunCheckpoints:
    """What a run holds; each answer is of the moment in which it is asked for.

    Args:
        store: Opened at the run.
    """

    def __init__(self, store: ObjectStore) -> None:
        """See the class; no request is made here."""
        self._store = store

    @property
    def url(self) -> str:
        """Of the run."""
        return self._store.url

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint of the run; None if none is committed. One GET; see `dcp_remote.latest`."""
        catalog = catalog_of(self._store)
        entry = catalog.latest() if catalog is not None else None
        return CheckpointInfo.of(entry) if entry is not None else None

    def steps(self) -> list[int]:
        """The steps of all live checkpoints, ascending; abandoned ones left out. One GET."""
        catalog = catalog_of(self._store)
        return [entry.step for entry in catalog.entries if not entry.abandoned] if catalog is not None else []

    def user(self, step: int | str | None = None) -> dict[str, Any]:
        """What was noted as `user` when a checkpoint was saved. At most three GETs.

        Raises:
            CheckpointNotFoundError: There is none.
        """
        return dict(read_manifest(self._store, step=step).user)

    def pin(self, step: int) -> None:
        """Exempt a checkpoint from retention, and from being replaced unasked by a job that went back before it.

        A GET and a PUT; one rank may call it, or all.

        Raises:
            CheckpointNotFoundError: No checkpoint of this step is live.
        """
        self._pin(step, pin=True)

    def unpin(self, step: int) -> None:
        """Take a pin away again.

        Raises:
            CheckpointNotFoundError: No checkpoint of this step is live.
        """
        self._pin(step, pin=False)

    def _pin(self, step: int, *, pin: bool) -> None:
        require_step(step)
        swap(self._store, lambda now: pinned(now, step, pin=pin), deadline=Deadline(_LOOK_SECONDS))
