"""`import_checkpoint`: saves a checkpoint of another format to a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote.common.digests import digest
from dcp_remote.common.geometry import Box
from dcp_remote.common.text import is_unicode, join_some
from dcp_remote.common.units import MEMORY_BUDGET_BYTES, MiB
from dcp_remote.errors import (
    CheckpointExistsError,
    CommitConflictError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    StorageError,
    UnsafeObjectError,
)
from dcp_remote.manager.manager import CheckpointManager
from dcp_remote.manager.progress import Progress, ProgressSetting
from dcp_remote.manager.reports import SaveReport
from dcp_remote.run.info import CheckpointInfo, latest
from dcp_remote.run.job import CheckpointLabels
from dcp_remote.saving.plan_cache import RunPlanner
from dcp_remote.serialization.leaves import FlatState, flatten_state
from dcp_remote.serialization.refused_values import refused_values
from dcp_remote.serialization.state_dict import PER_RANK_KEY, convert_per_rank
from dcp_remote.serialization.tensors import byte_view
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import require_budget, require_timeout
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS
from dcp_remote.transfer.checkpoint import LOOK_SECONDS, SavedCheckpoint
from dcp_remote.transfer.piece_planner import PiecePlanner, Together
from dcp_remote.transfer.source import PIECE_BYTES_MAX, open_source
from dcp_remote.transfer.tensor_source import Source

logger = logging.getLogger(__name__)

# A terabyte at 50 MB/s.
TIMEOUT_SECONDS = 6 * 3600.0

# Shares of the budget. The save holds its own twice, since a shard is put together beside those that are being sent;
# a piece is held three times: one that is read, its request's copy, and small ones that were read together.
_PIECE_SHARE = 1 / 8
_SAVE_SHARE = 5 / 16


def import_checkpoint(
    source: str | os.PathLike[str] | ObjectStore,
    run_url: str | os.PathLike[str] | ObjectStore,
    *,
    step: int,
    name: str | None = None,
    overwrite: bool = False,
    start_over: bool = False,
    allow_pickle: bool = False,
    source_options: Mapping[str, object] | None = None,
    storage_options: Mapping[str, object] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: ProgressSetting = True,
) -> SaveReport:
    """Save a checkpoint of another format to a run, in one process; return the report of the save.

    Names, dtypes and all bits are kept. Weights of Hugging Face, and of a file that is a state dict, get names below
    `model`; small files beside weights become the entry `files`. Other entries keep their names. Values of single ranks
    in a torch folder that `export_checkpoint` wrote are such values again.

    The checkpoint is committed at once, or not at all, then verified, then named: after a crash in between, the
    checkpoint has no name. This call takes the fence: a training that saves to the run meanwhile is refused by
    `FencedError`. Steps are imported in ascending order; steps that are there stay.

    Costs: one GET per 8 MiB of a tensor, and per 8 MiB of small tensors or objects that lie together in a file; two to
    five more per chunk of torch's that is larger than 8 MiB, and one more per tensor of torch.save above 4 KiB; a HEAD
    per file at the end; the requests of a save. The verification reads the new checkpoint once, in ranges of 8 MiB, and
    compares each tensor with a digest of what was read from the source, and objects with the digests that the save
    made.

    Holds `memory_budget_bytes`. On top come objects and small files, tensors and chunks in torch's files that are not
    contiguous (one at a time, twice), and sparse and quantized tensors of torch's checkpoints. The C library may keep
    as much freed memory again (32 MiB held: 40 to 64 resident with glibc, 20 with MALLOC_MMAP_THRESHOLD_=131072).

    Args:
        source: URL, path or store of a folder that `torch.distributed.checkpoint` (FileSystemWriter, FsspecWriter,
            s3torchconnector) or Hugging Face (safetensors) wrote; or URL or path of a file of safetensors or
            `torch.save` (.pt, .pth, .ckpt, .bin), of which only tensors and plain values are loaded.
        run_url: URL, path or store of the run, which may be new.
        step: Step of the new checkpoint.
        name: Name of the new checkpoint, which it gets once it is verified.
        overwrite: True to replace the run's checkpoint of this step. The new one is verified after that: if it differs,
            the step is lost.
        start_over: True to leave the checkpoints of the run behind, marked as abandoned.
        allow_pickle: True to load and save objects that need code; torch's checkpoints alone.
        source_options: Options of the source's store.
        storage_options: Options of the run's store.
        memory_budget_bytes: Limit of the memory for tensors, in bytes; 256 MiB.
        timeout_seconds: Deadline of the save, in seconds; six hours. A request to the source is repeated for five
            minutes, the first ones for 30 s.
        progress: True for a bar of tqdm or a log; False for neither; or a function that gets a `ProgressReport`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format.
        CheckpointExistsError: The run has a checkpoint of this step.
        InvalidArgumentError: The step is below the newest one of the run, or the source uses what is not supported.
        UnsafeObjectError: An object needs code to load. Nothing was saved.
        CorruptCheckpointError: The source is damaged, or was changed meanwhile, and nothing was saved; or the saved
            checkpoint differs from what was read, and was deleted again.
        CommitConflictError: Another job saved to the run while the import began; nothing was imported.
        FencedError: Another job took the run meanwhile.
        SaveFailedError: The run's store, or the source's, failed.
        StorageError: The run's store failed before the save, or after it; the message says which.
    """
    CheckpointLabels.of(step, name=name, metrics=None, overwrite=overwrite, exist_ok=False)  # before all is read
    require_timeout(timeout_seconds)
    require_budget(memory_budget_bytes)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidArgumentError(
            "import_checkpoint runs in one process, and this one is a rank of several. Call it in a program of its own."
        )
    piece_bytes_max = min(PIECE_BYTES_MAX, max(MiB // 4, int(memory_budget_bytes * _PIECE_SHARE)))
    opened = open_source(
        source,
        storage_options=source_options,
        allow_pickle=allow_pickle,
        piece_bytes_max=piece_bytes_max,
        retry_seconds=min(RANGE_RETRY_SECONDS, timeout_seconds),
    )

    _require_storable(opened, allow_pickle=allow_pickle)
    for place in _find_numbered(opened.state, ()):
        logger.warning(
            "%s: the states of %s have numbers for names, as an optimizer's own state_dict() gives them, which no "
            "restore matches with parameters. To go on with this optimizer, load the file by torch.load, and save its "
            "model and optimizer by CheckpointManager.",
            opened.url,
            place,
        )

    def find_newest() -> CheckpointInfo | None:
        look_seconds = min(LOOK_SECONDS, timeout_seconds)
        return None if start_over else latest(run_url, storage_options=storage_options, timeout_seconds=look_seconds)

    newest = find_newest()

    def require_same() -> None:
        """Check that no checkpoint was committed before the save took the fence; afterwards no other job commits."""
        now = find_newest()
        if (now and now.save_id) != (newest and newest.save_id):
            raise CommitConflictError(
                "Another job saved to the run while the import began, and its checkpoint would have been left behind; "
                "nothing was imported. Import once more, or into a run of its own.",
                url=run_url,
                newest=now and now.step,
            )

    if newest is not None and newest.step == step and not overwrite:
        raise CheckpointExistsError(
            "The run has a checkpoint of this step. Choose another step.", url=run_url, step=step
        ).advise(overwrite="overwrite=True replaces it")
    if newest is not None and newest.step > step and not overwrite:
        raise InvalidArgumentError(
            "The run has a newer checkpoint, from which every job would go on. Import to a step above "
            f"{newest.step}, or into another run.",
            url=run_url,
            step=step,
        )
    resumed_from = newest.step if newest is not None else None
    planner = _SourcePlanner(opened, check=require_same, bytes_max=piece_bytes_max)
    with _ImportingManager(
        planner,
        run_url,
        resumed_from=resumed_from,
        start_over=start_over,
        storage_options=storage_options,
        memory_budget_bytes=max(1, int(memory_budget_bytes * _SAVE_SHARE)),
        timeout_seconds=timeout_seconds,
        allow_pickle=allow_pickle,
        progress=progress,
        dedup=False,  # the comparison would read the source once more
    ) as run:
        note = {"imported_from": opened.url, "imported_kind": opened.kind}
        try:
            run.save(step, opened.state, overwrite=overwrite, wait=True, user=note)
        except CheckpointExistsError:
            require_same()  # whose error says what happened, where another job has begun the run meanwhile
            raise
        report = cast("SaveReport", run.last_save)
        done = "verified"
        try:
            saved = SavedCheckpoint(
                run_url,
                step=step,
                storage_options=storage_options,
                allow_pickle=allow_pickle,
                buffer_bytes_max=memory_budget_bytes // 2,
                look_seconds=RANGE_RETRY_SECONDS,  # hours of work may lie behind
                retry_seconds=RANGE_RETRY_SECONDS,
            )
            try:
                _verify(saved, planner.digests, bytes_max=memory_budget_bytes // 2, progress=progress)
            except CorruptCheckpointError as damage:
                raise _delete_damaged(run, step, damage) from damage
            if name is not None:
                done = "named"
                run.run.name(step, name, move=True)
        except StorageError as error:
            raise type(error)(
                f"{error.what} The checkpoint is saved, but could not be {done}. Import it again.",
                **error.details | {"step": step},
            ).advise(overwrite="overwrite=True replaces it") from error
    return report


def _delete_damaged(run: CheckpointManager, step: int, damage: CorruptCheckpointError) -> CorruptCheckpointError:
    """Delete a checkpoint that differs from what was read, and return the error that says so."""
    done = "was deleted; import once more"
    try:
        run.run.delete(step, force=True)
    except DcpRemoteError as error:
        done = f"could not be deleted ({error.what}); delete it before it is used"
    return CorruptCheckpointError(
        f"The new checkpoint was damaged when it was read back, and {done}.",
        **damage.details | {"step": step, "older": None, "cause": damage.what},
    )


class _ImportingManager(CheckpointManager):
    """Manager of one save, which reads from a source."""

    def __init__(self, planner: _SourcePlanner, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._planner = planner

    def _make_planner(self) -> RunPlanner:
        return self._planner


class _SourcePlanner(PiecePlanner, RunPlanner):
    """Planner that reads a source. `check` is called when the save has the fence, before anything is read."""

    _source: Source

    def __init__(self, source: Source, *, check: Callable[[], None], bytes_max: int) -> None:
        super().__init__(source, bytes_max=bytes_max)
        self._check = check
        self._per_rank = _take_per_rank(source)

    def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
        # Here, since the manager sorts the top-level keys, and takes values of this rank alone.
        flat, own = state_dict, flatten_state(self._per_rank)
        places = {key: number for number, key in enumerate(self._source.state)}
        paths = dict(sorted(flat.paths.items(), key=lambda item: places[item[1][0]])) | own.paths
        values = flat.values | own.values
        ordered = {name: values[name] for name in paths if name in values}
        super().set_up_planner(FlatState(ordered, paths), *args, **options)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self.is_all_read:  # there are no tensors
            self._source.reader.require_unchanged()
        return plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._check()
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]  # torch's method knows no piece of a plain tensor

    def note_read(self, tensor: torch.Tensor) -> None:
        if self.is_all_read:
            self._source.reader.require_unchanged()


def _require_storable(source: Source, *, allow_pickle: bool) -> None:
    """Refuse what the save would refuse, before it takes the run from a training."""
    for name in flatten_state(source.state).values:
        if not is_unicode(name):
            raise InvalidArgumentError(
                "A name in the source is not Unicode: it has half of a surrogate pair. Load the source by its own "
                "tool, rename the entry, and save it by CheckpointManager.",
                url=source.url,
                name=ascii(name),
            )
    refused = [] if allow_pickle else refused_values({k: v for k, v in source.state.items() if k != PER_RANK_KEY})
    if refused:
        raise UnsafeObjectError(
            "Values of the source need code to load, or cannot be stored. Load the source by its own tool, and save "
            "what is needed by CheckpointManager.",
            url=source.url,
            values=join_some([f"{value.path} ({value.type_name})" for value in refused]),
        ).advise(allow_pickle="allow_pickle=True imports them, if you trust the source")


def _find_numbered(value: object, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the places of state dicts of optimizers whose parameters have numbers for names."""
    if not isinstance(value, dict):
        return
    states = value.get("state")
    if "param_groups" in value and isinstance(states, dict) and any(str(key).isdecimal() for key in states):
        yield ".".join(path)
    for key, one in value.items():
        yield from _find_numbered(one, (*path, str(key)))


def _take_per_rank(source: Source) -> dict[str, Any]:
    """Take the values of single ranks out of a source's state, and return them in the form in which a save has them.

    They must be `per_rank.<rank>.<key>`, as `export_checkpoint` writes them.
    """
    ranks = source.state.pop(PER_RANK_KEY, None)
    if ranks is None:
        return {}
    if not isinstance(ranks, dict) or not all(
        str(rank).isdecimal() and isinstance(ranks[rank], dict) for rank in ranks
    ):
        raise InvalidArgumentError(
            "The key per_rank of the source is reserved for values of single ranks, and has other values. Load the "
            "source by its own tool, and save it by CheckpointManager under another key.",
            url=source.url,
        )
    return {
        PER_RANK_KEY: {
            str(rank): {
                key: convert_per_rank((key,), (PER_RANK_KEY, rank, key), _read_all(source, value, (rank, key)))
                for key, value in own.items()
            }
            for rank, own in ranks.items()
        }
    }


def _read_all(source: Source, value: Any, path: tuple[str | int, ...]) -> Any:
    """Return a value of one rank with its tensors, which are read."""
    if isinstance(value, dict):
        return {key: _read_all(source, one, (*path, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [_read_all(source, one, (*path, number)) for number, one in enumerate(value)]
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    return source.read_whole(".".join(map(str, (PER_RANK_KEY, *path))), value)


def _verify(
    saved: SavedCheckpoint,
    digests: Mapping[tuple[str, Box], bytes],
    *,
    bytes_max: int,
    progress: ProgressSetting,
) -> None:
    """Read all boxes once, and compare their digests; of other entries the bytes with the digests of the save."""
    sizes = {(name, box): box.elements * saved.dtype(name).itemsize for name, box in digests}
    reads = Together(saved, sizes, bytes_max=bytes_max, small_bytes_max=bytes_max)
    with Progress(progress, "verify", is_coordinator=True) as shown:
        shown.begin(saved.step, sum(sizes.values()))
        for (name, box), expected in digests.items():
            if digest(byte_view(reads.take((name, box)))) != expected:
                raise CorruptCheckpointError(
                    "A saved tensor differs from what was read.",
                    url=saved.store.url,
                    tensor=name,
                    offsets=box.offsets,
                )
            shown.add(sizes[name, box])
        read_names = {name for name, _ in digests}
        saved.check(name for name in saved.manifest.names() if name not in read_names)
        shown.close(f"verified step {saved.step}: all bits are those that were read")
