"""RemoteReader: torch's `StorageReader` for checkpoints of dcp_remote, at any world size, with every byte verified.

A reader makes no collective call of its own: torch does not tell it the process group, and a collective call that one
rank does not make hangs the others. Every rank reads the manifest, then the ranges that it needs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_remote.common.picklable_errors import make_picklable, replace_unpicklable_errors
from dcp_remote.common.units import MEMORY_BUDGET_BYTES
from dcp_remote.coordination.group import default_world_size
from dcp_remote.errors import CommitConflictError, InvalidArgumentError
from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.dcp_metadata import SourceMeta, to_dcp_metadata
from dcp_remote.loading.engine import read_targets
from dcp_remote.loading.load_options import LoadOptions, Patterns, Rename
from dcp_remote.loading.planner import RemoteLoadPlanner
from dcp_remote.loading.read_items import make_target_layers
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import (
    Located,
    Location,
    ThreadLocation,
    join_job,
    require_budget,
    require_timeout,
)
from dcp_remote.storage.outages import name_speaker
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS

logger = logging.getLogger(__name__)


class _ThreadLoad(ThreadLocation):
    """Load of one thread: its location, its id, and the manifest once it is read."""

    load_id: str | None = None
    manifest: Manifest | None = None
    is_coordinator = False


class RemoteReader(Located, StorageReader):
    """Read a checkpoint: `dcp.load(state, storage_reader=RemoteReader("s3://bucket/checkpoint"))`.

    Works at any world size and with any sharding of the template. Each rank makes one GET for the manifest (for a run
    up to two more, to find it, and from a cloud perhaps one in vain, since these are sent at once), one for each of all
    segments, one GET per range of at most 8 MiB that it needs, and one small GET per shard of which it needs only parts
    of pieces. No code runs on load. If a load raises, the template holds parts of the checkpoint and must not be used.

    torch's own planner names one missing key, and leaves out what the state lacks without a message. With a planner of
    this reader, all differences are one `StateMismatchError`, and the options of `RemoteLoadPlanner` apply:

        reader = RemoteReader("s3://bucket/checkpoint", exclude="*head.*")
        dcp.load(state, storage_reader=reader, planner=reader.planner())

    A reader can be used for several loads, one after another, or at the same time from several threads. A pickle of a
    reader holds its configuration, with credentials that were passed as options, and never a connection.

    Args:
        url: URL or path of a checkpoint, or its store, as for `RemoteWriter`; or of a run that `CheckpointManager`
            saves into.
        step: Step of a run, or name of a checkpoint in it; None, "latest" or "last" is the newest.
        include: Names or patterns to load; like the following, for the planner that `planner` makes.
        exclude: Names or patterns that stay as they are.
        rename: Dict of names, or their first parts, in the checkpoint to those in the state; or a function.
        missing: "keep" to keep values that the checkpoint lacks.
        unexpected: "ignore" to leave out entries that no rank has a value for.
        dtype: "convert" to convert tensors to the dtypes of the state.
        allow_pickle: True to load objects that need code; they can do anything to this process.
        storage_options: Options of the store, as for `RemoteWriter`.
        memory_budget_bytes: Limit of the buffers beyond the state, in bytes per rank; 256 MiB.
        timeout_seconds: Time for which one request is retried while the store fails, in seconds; 300. A load has no
            deadline: a load goes on as long as bytes arrive.

    Raises:
        InvalidArgumentError: The URL or an option is wrong; no request is made here.
    """

    _thread: _ThreadLoad

    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        step: int | str | None = None,
        include: Patterns | None = None,
        exclude: Patterns = (),
        rename: Rename | None = None,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        dtype: Literal["error", "convert"] = "error",
        allow_pickle: bool = False,
        storage_options: Mapping[str, object] | None = None,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        timeout_seconds: float = RANGE_RETRY_SECONDS,
    ) -> None:
        """Store the settings and open the store; no request is made."""
        super().__init__()
        require_budget(memory_budget_bytes)
        require_timeout(timeout_seconds)
        self._options = LoadOptions(
            include=include, exclude=exclude, rename=rename, missing=missing, unexpected=unexpected, dtype=dtype
        )
        self._step = step
        self._timeout_seconds = timeout_seconds
        self._allow_pickle = allow_pickle
        self._memory_budget_bytes = memory_budget_bytes
        self._thread = _ThreadLoad([(Location.of(url, storage_options), None)])

    @property
    def load_id(self) -> str | None:
        """Id of the load under way in this thread, or of the last one; None before the first."""
        return self._thread.load_id

    def planner(self) -> RemoteLoadPlanner:
        """Return a planner with the options of this reader, for one load: a reader never sees the state itself."""
        return RemoteLoadPlanner(**vars(self._options))

    # ---- torch's protocol, in the order in which torch calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on to another checkpoint in this thread, with the same options; None keeps the URL. Makes no request.

        Never raises: if the URL cannot be opened, every load fails at `read_metadata` until a later call gives one that
        can. A new thread begins with the URL that the last call, in any thread, has set.
        """
        self._thread.manifest = None
        self._thread.move_to(checkpoint_id)

    # Not named `kwargs`: torch would then call again with `rank=` after a failure, and leave out the collective calls
    # on this rank alone, which hangs all ranks (state_dict_loader.py of torch 2.13).
    @replace_unpicklable_errors
    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Read and check the manifest, as a whole; one GET, and one for each segment, on every rank.

        A failure is raised when the returned metadata is used: by `set_up_storage_reader`, in a load. torch replaces
        an exception that is raised *here* by an AssertionError, so that a missing checkpoint would look like a store
        that is down.

        Raises:
            CheckpointNotFoundError: When used: no checkpoint is committed here.
            CorruptCheckpointError: When used: the manifest is damaged.
            UnsupportedFormatError: When used: a newer version wrote it.
            InvalidArgumentError: When used: `reset` was given a URL that cannot be opened, or a plain path although
                this reader's URL is none.
        """
        self._thread.load_id = os.urandom(16).hex()
        self._thread.manifest = None
        try:
            self._thread.raise_refusal()
            join_job(self._thread.location, default_world_size())
            manifest = read_manifest(self._store, step=self._step, retry_seconds=self._timeout_seconds)
            metadata = to_dcp_metadata(manifest)
        except Exception as error:  # noqa: BLE001  # raised when the metadata is used
            return _UnreadMetadata(make_picklable(error))
        self._thread.manifest = manifest
        metadata.storage_meta = SourceMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=manifest.save_id,
            load_id=self._thread.load_id,
            step=manifest.run.step if manifest.run is not None else None,
            thinned=manifest.run.thinned if manifest.run is not None else (),
        )
        return metadata

    @replace_unpicklable_errors
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        """Raise the error that `read_metadata` kept; the coordinator alone logs from now on.

        Raises:
            InvalidArgumentError: This reader has options for a planner, and torch has set up another planner.
        """
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error
        self._thread.is_coordinator = is_coordinator
        name_speaker(self._store.url, is_speaker=is_coordinator)
        planned = metadata.storage_meta.options if isinstance(metadata.storage_meta, SourceMeta) else None
        if self._options.given and planned != self._options:
            raise InvalidArgumentError(
                "Only the planner of a load can apply these options of the reader: "
                "dcp.load(state, storage_reader=reader, planner=reader.planner()).",
                url=self._store.url,
                options=", ".join(self._options.given),
            )

    @replace_unpicklable_errors
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the id of the save that this rank is about to read."""
        return replace(plan, storage_data=self._manifest_read().save_id)

    @replace_unpicklable_errors
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same save; called on the coordinator.

        Raises:
            CommitConflictError: The checkpoint was replaced while the ranks were reading its manifest.
        """
        saves = {plan.storage_data for plan in plans}
        if len(saves) > 1:
            raise CommitConflictError(
                "The checkpoint was replaced while it was being loaded. Load again.",
                url=self._store.url,
                saves=", ".join(sorted(map(str, saves))),
            )
        return plans

    @replace_unpicklable_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank's plan asks for; the planner is called from this thread alone.

        Of templates that share memory, as tied weights do, the last in the plan wins.

        Raises:
            CorruptCheckpointError: Bytes are not those that were written.
            CheckpointNotFoundError: The checkpoint was removed or replaced meanwhile.
            UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
            InvalidArgumentError: A template cannot take what is read: a sparse template for a dense tensor, or an
                expanded one. Nothing was read then, unless the planner makes templates on demand.
        """
        began_seconds = time.monotonic()
        manifest = self._manifest_read()
        for targets in make_target_layers(manifest, plan, planner, allow_pickle=self._allow_pickle):
            read_targets(
                self._store,
                manifest,
                targets,
                memory_budget_bytes=self._memory_budget_bytes,
                retry_seconds=self._timeout_seconds,
            )
        if self._thread.is_coordinator:
            seconds = time.monotonic() - began_seconds
            logger.info("loaded %d items of %s in %.1f s", len(plan.items), self._store.url, seconds)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _manifest_read(self) -> Manifest:
        if self._thread.manifest is None:
            raise InvalidArgumentError(
                "This reader has no load under way in this thread. Use it through torch's dcp.load."
            )
        return self._thread.manifest


class _UnreadMetadata(Metadata):
    """Stand-in for metadata that could not be read; raises the error when it is used."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def _refuse(self) -> NoReturn:
        raise self.error

    state_dict_metadata = planner_data = storage_meta = property(_refuse)
