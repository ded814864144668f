"""`Run` and `open_run`: a run as one process sees it, for evaluation, serving and tools. Only `load` imports torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import CheckpointGoneError, CheckpointNotFoundError, InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Owner
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.info import CheckpointInfo, catalog_of, require_run_url
from dcp_remote.run.job import require_step_or_name
from dcp_remote.run.labels import give_names, set_pin, take_names
from dcp_remote.run.lookup import gone_error, read_manifest
from dcp_remote.run.shard_check import Depth
from dcp_remote.run.verification import VerifyReport, verify
from dcp_remote.run.waiting import POLL_SECONDS, wait_for_newer
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import Location, require_timeout
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

logger = logging.getLogger(__name__)


def open_run(
    url: str | os.PathLike[str] | ObjectStore,
    *,
    storage_options: Mapping[str, object] | None = None,
    timeout_seconds: float = RANGE_RETRY_SECONDS,
) -> Run:
    """Open a run for one process, without torch.distributed; sends no request.

        run = open_run("s3://bucket/run")
        step = None
        while (newest := run.wait_for_newer(step, timeout_seconds=3600)) is not None:
            evaluate(run.load(newest.step, keys="model.*"))
            step = newest.step

    Args:
        url: URL, path or store of the run, as for `CheckpointManager`. The run need not have begun.
        storage_options: Options of the store, as for `RemoteWriter`.
        timeout_seconds: Time for which one request is retried while the store fails, in seconds; 300.

    Raises:
        InvalidArgumentError: The URL, an option or the timeout is wrong.
    """
    require_timeout(timeout_seconds)
    return Run(Location.of(url, storage_options).store, timeout_seconds=timeout_seconds)


class Run:
    """Checkpoints of a run, for one process; from `open_run`, or `CheckpointManager.run`.

    Nothing is kept between calls: each reads the catalog anew. Methods that read need the permission to read objects
    alone, and neither stop nor disturb a job that saves into the run, nor its retention. Only `pin`, `unpin`, `name`,
    `unname` and `delete` write: by one swap of the catalog, whole or not at all, also if this process is killed.

    Every method takes a step (an integer) or a name (a text) where it takes `step`; "latest" and "last" mean the newest
    checkpoint. All raise:

    - `CorruptCheckpointError`: The catalog or a manifest is damaged; or the catalog is lost: `dcp-remote recover`.
    - `UnsupportedFormatError`: A newer version of dcp_remote wrote the run.
    - `InvalidArgumentError`: An argument is wrong; or a checkpoint by itself lies at this URL.
    - `CheckpointNotFoundError`: There is no checkpoint of this step or name; `BucketNotFoundError` if there is no such
      bucket.
    - `StorageError`: The store refused, or did not answer for `timeout_seconds`.

    Args:
        store: Store opened at the run.
        timeout_seconds: Time for which one request is retried while the store fails, in seconds; for methods that
            write, the deadline of the call.
        owner: Returns the job for which the methods that write are called, which raise `FencedError` once a newer job
            owns the run; None for a person or a tool.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        timeout_seconds: float = RANGE_RETRY_SECONDS,
        owner: Callable[[], Owner | None] = lambda: None,
    ) -> None:
        """Store the arguments; no request."""
        if isinstance(store, str):
            raise InvalidArgumentError("Run takes a store: use open_run(url).", url=store)
        self._store, self._timeout_seconds, self._owner = store, timeout_seconds, owner
        self._shown: CheckpointInfo | None = None  # last checkpoint that `latest`, `best` or `wait_for_newer` returned

    def __repr__(self) -> str:
        """Return the class and the URL; options, which may be secret, are left out."""
        return f"Run({self._store.url!r})"

    @property
    def url(self) -> str:
        """URL of the run."""
        return self._store.url

    # ---- reading

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return all live checkpoints by ascending step, abandoned ones included; [] if there is none. One GET.

        Where there is no run yet, one HEAD and one LIST more.
        """
        catalog = self._catalog()
        return [CheckpointInfo.of(entry) for entry in catalog.entries] if catalog is not None else []

    def steps(self) -> list[int]:
        """Return the steps of all live checkpoints that are not abandoned, ascending. Costs as `checkpoints`."""
        return [info.step for info in self.checkpoints() if not info.abandoned]

    def latest(self) -> CheckpointInfo | None:
        """Return the newest checkpoint that is not abandoned; None if there is none. Costs as `checkpoints`."""
        catalog = self._catalog()
        entry = catalog.latest() if catalog is not None else None
        self._shown = CheckpointInfo.of(entry) if entry is not None else None
        return self._shown

    def best(self, metric: str, *, largest: bool = False) -> CheckpointInfo | None:
        """Return the checkpoint with the best value of a metric that was given to `save`; of equals the newest.

        One GET. Abandoned checkpoints, and those without the metric, do not count.

        Args:
            metric: Name of the metric.
            largest: True if larger values are better, as of an accuracy, and False if smaller ones are.

        Returns:
            The checkpoint; None if none has the metric, which is logged if they have others.
        """
        if not isinstance(metric, str):
            raise InvalidArgumentError("metric must be a text, such as best('loss').", metric=metric)
        if not isinstance(largest, bool):
            raise InvalidArgumentError("largest must be True or False.", largest=largest)
        counted = [info for info in self.checkpoints() if not info.abandoned]
        having, sign = [info for info in counted if metric in info.metrics], 1 if largest else -1
        best = max(having, key=lambda info: (sign * info.metrics[metric], info.step), default=None)
        self._shown = best
        known = sorted({name for info in counted for name in info.metrics})
        if best is None and known:
            logger.warning("%s: no checkpoint has the metric %r; they have %s", self.url, metric, ", ".join(known))
        return best

    def exists(self, step: int | str) -> bool:
        """Return whether a checkpoint of this step or name is live, abandoned or not. One GET."""
        require_step_or_name(step)
        catalog = self._catalog()
        return catalog is not None and catalog.find(step) is not None

    def user(self, step: int | str | None = None) -> dict[str, Any]:
        """Return the `user` metadata that was given when a checkpoint was saved; None is the newest.

        At most three GETs; the manifest, in which the metadata lie, can have many megabytes.
        """
        return dict(read_manifest(self._store, step=step, retry_seconds=self._timeout_seconds, whole=False).user)

    def load(self, step: int | str | None = None, **options: Any) -> dict[str, Any]:
        """Read a checkpoint, or part of it, as `dcp_remote.load` does: tensors on the CPU, in the nesting saved.

        Retention of the job that saves may delete the checkpoint meanwhile, unless it is the newest, pinned or named.

        Args:
            step: Step or name of the checkpoint; None is the newest.
            **options: Arguments of `dcp_remote.load` by name, such as `keys`; all but URL, step and `storage_options`.

        Raises:
            CheckpointGoneError: The checkpoint was deleted, replaced or thinned while it was being read, or deleted
                since `latest`, `best` or `wait_for_newer` returned its step; the details `next` and `newest` are steps
                to read instead.
            UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
        """
        # Imported here because it imports torch, which takes seconds.
        from dcp_remote.loading.load import load

        try:
            return load(self._store, step=step, **{"timeout_seconds": self._timeout_seconds, **options})
        except CheckpointGoneError:
            raise
        except CheckpointNotFoundError as error:
            if self._shown is None or self._shown.step != step:
                raise
            url, save_id = self.url, self._shown.save_id
            raise gone_error(self._catalog(), save_id=save_id, step=self._shown.step, url=url) from error

    def verify(self, step: int | str | None = None, *, depth: Depth = "sample") -> VerifyReport:
        """Compare what is stored with the manifests: which shards and entries are damaged, and of which checkpoints.

        A shard that several checkpoints name is read once. Objects that no checkpoint names are not looked at, nor are
        headers of shards, which no load needs. A checkpoint that is deleted meanwhile is not damaged. Costs a GET for
        the catalog and one for each manifest and segment, and a HEAD for each shard; where damage is found, again a GET
        for all of these documents. Holds up to 128 MiB, one manifest, four more without segments, and 8 bytes for each
        piece.

        Args:
            step: Step or name of one checkpoint; None is all that are live, or a checkpoint by itself.
            depth: "quick" compares the lengths of shards, and reads none. "sample" also reads up to three blocks of
                each shard (at most 1 MiB each, other ones in each call) and its block table: up to four GETs. "deep"
                reads all that the checkpoints name: a GET for each block table, and for each 4 MiB. A shard in which
                "sample" finds damage is read as by "deep"; ranges that differ are read twice.

        Raises:
            CorruptCheckpointError: The catalog is damaged or lost; all other damage is in the report.
            CheckpointGoneError: A checkpoint by itself was replaced meanwhile.
        """
        if step is not None:
            require_step_or_name(step)
        return verify(self._store, step=step, depth=depth, retry_seconds=self._timeout_seconds)

    def wait_for_newer(
        self, step: int | None, *, timeout_seconds: float, poll_seconds: float = POLL_SECONDS
    ) -> CheckpointInfo | None:
        """Wait until the newest checkpoint is above a step; return it, or None if there is none in time.

        The run need not have begun. A job that goes back to an older checkpoint has no newer one until it is past this
        step again. While the store does not answer, the wait goes on, and a line says so. Ctrl-C ends the wait.

        Costs a GET of the catalog per look: at once, after each pause, and at the deadline (120 an hour by default).

        Args:
            step: Step of the checkpoint that is known; None waits for any checkpoint.
            timeout_seconds: Longest wait, in seconds.
            poll_seconds: Pause between two looks, in seconds; 30.

        Raises:
            PermissionDeniedError: The catalog may not be read.
        """
        self._shown = wait_for_newer(self._store, step, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds)
        return self._shown

    # ---- writing

    def pin(self, step: int | str) -> None:
        """Exempt a checkpoint from retention, and from being replaced by a job that went back before it.

        A GET and a PUT. One rank or process may call this, or several.

        Raises:
            CommitUnknownError: The store did not say whether the catalog was swapped.
        """
        set_pin(self._store, step, pin=True, deadline=self._deadline(), owner=self._owner())

    def unpin(self, step: int | str) -> None:
        """Remove the pin of a checkpoint. Costs and errors as of `pin`."""
        set_pin(self._store, step, pin=False, deadline=self._deadline(), owner=self._owner())

    def name(self, step: int | str, name: str | Iterable[str], *, move: bool = False) -> None:
        """Give one or several names to a checkpoint that is live; all or none, at once for every reader.

        A GET and a PUT. `dcp-remote recover`, after a loss of the catalog, knows only the names given to `save`.

        Args:
            step: Step or name of the checkpoint.
            name: Name or names, such as "best" or "epoch=3-step=500.ckpt": 1 to 200 characters, of digits alone only if
                that is the step. Names that the checkpoint has already stay.
            move: True to take the names from other checkpoints that have them.

        Raises:
            CheckpointExistsError: Other checkpoints have some of the names, and `move` is False.
            CommitUnknownError: The store did not say whether the catalog was swapped.
        """
        give_names(self._store, step, name, move=move, deadline=self._deadline(), owner=self._owner())

    def unname(self, name: str | Iterable[str]) -> None:
        """Take one or several names from the checkpoints that have them, which stay. Costs and errors as of `pin`."""
        take_names(self._store, name, deadline=self._deadline(), owner=self._owner())

    def delete(self, step: int | str, *, force: bool = False) -> None:
        """Delete a checkpoint: from the catalog by one swap, then its objects that no other checkpoint uses.

        Killed in between, this leaves objects for `dcp-remote gc`, as it does where objects may not be deleted, which
        is logged. A reader of the checkpoint gets `CheckpointGoneError`; a save that reuses its data begins again. One
        rank calls this.

        Costs two GETs and a PUT, a GET for the manifest of each checkpoint that may use the same objects, and a DELETE
        per 1,000 objects.

        Args:
            step: Step or name of the checkpoint, abandoned or not.
            force: True to delete also a pinned checkpoint, or the newest.

        Raises:
            InvalidArgumentError: The checkpoint is pinned, or the newest, and `force` is False. Nothing was changed.
            CommitUnknownError: The store did not say whether the catalog was swapped.
        """
        require_step_or_name(step)
        deletions, deadline = Deletions(self._store), self._deadline()
        applied = deletions.retire([step], deadline=deadline, force=force, owner=self._owner())
        deleted = deletions.queue.delete(deadline=deadline, pause_seconds=0)
        logger.info("%s: deleted step %s (%d objects)", self.url, ", ".join(map(str, applied.retired)), deleted.removed)
        left = len(deleted.failed) + deleted.left + deleted.given_up
        if left or applied.reason is not None:
            reason = applied.reason or next(iter(deleted.failed.values()), "the deadline passed")
            logger.warning("%s: objects of a deleted checkpoint are left to `dcp-remote gc`: %s", self.url, reason)

    # ---- internals

    def _catalog(self) -> Catalog | None:
        catalog = catalog_of(self._store, retry_seconds=self._timeout_seconds)
        if catalog is None:
            require_run_url(RetryingStore(self._store, self._deadline()))
        return catalog

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_seconds)
