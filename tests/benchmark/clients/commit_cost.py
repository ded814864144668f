"""Cost of a commit for the coordinator of many ranks, with reports as ranks make them, but made in one process.

    python -m tests.benchmark.clients.commit_cost --data-parallel 128

Tensors are sharded by 8 tensor-parallel and so many data-parallel ranks, in stages of a pipeline; each rank writes a
chunk of each tensor of its stage. The first save is planned, and two are committed; in the second one shards have other
names and other digests. Printed is, for each phase, the CPU time of the process, and the longest time for which another
thread could not take the interpreter, without the time for which the system ran neither of both.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from dcp_remote.common.arrays import I64, shrink_integers
from dcp_remote.common.digests import DIGEST_BYTES, table_entries
from dcp_remote.common.gil import short_switch_interval
from dcp_remote.format.manifest import Pieces, Shards, TensorKind, Tensors
from dcp_remote.format.shard import ShardNames
from dcp_remote.manager.reports import RankFigures, Seconds, combine
from dcp_remote.saving.manifest_assembly import Planned, assemble_manifest, find_orphaned_shards
from dcp_remote.saving.plan_table import REPLICA, VALUE, PlanTable, arrange, pack_names
from dcp_remote.saving.rank_report import RankReport, SentReport, UploadStats

URL = "s3://bucket/run"
_TENSOR_PARALLEL = 8
_ROWS, _WIDTH = 64, 2048  # of a chunk
_SHARDS = 6  # of a rank
_TICK_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a job: tensor-parallel ranks are neighbors, then data-parallel ones, then stages."""

    data_parallel: int
    stages: int = 16  # of the pipeline
    tensors: int = 214  # of a stage

    @property
    def ranks_of_a_stage(self) -> int:
        """Number of ranks that hold a chunk of each tensor of a stage."""
        return _TENSOR_PARALLEL * self.data_parallel

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.stages * self.ranks_of_a_stage

    def names(self, stage: int) -> tuple[str, ...]:
        """Return the names of the tensors of a stage."""
        return tuple(f"model.stage.{stage}.{n // 27}.block.{n % 27}.weight" for n in range(self.tensors))

    def offsets(self, hint: int) -> tuple[int, int]:
        """Return the offsets of a rank's chunk of any tensor of its stage."""
        return hint // _TENSOR_PARALLEL * _ROWS, hint % _TENSOR_PARALLEL * _WIDTH

    def table(self, rank: int) -> PlanTable:
        """Return the plan of a rank, as `plan_cache.to_table` makes it; each rank has random states of its own."""
        stage, hint = divmod(rank, self.ranks_of_a_stage)
        objects = ["step"] if rank == 0 else []
        names = [*self.names(stage), *objects]

        def tiled(values: Sequence[int]) -> I64:
            return np.tile(np.array(values, dtype=np.int64), self.tensors)

        return PlanTable(
            packed_names=pack_names(names, {name: tuple(name.split(".")) for name in names}),
            is_object=np.array([False] * self.tensors + [True] * len(objects)),
            role=np.array([REPLICA] * self.tensors + [VALUE] * len(objects), dtype=np.uint8),
            kind=np.zeros(len(names), dtype=np.uint8),
            dimensions=np.array([2] * self.tensors + [0] * len(objects), dtype=np.uint8),
            shapes=shrink_integers(tiled([self.data_parallel * _ROWS, _TENSOR_PARALLEL * _WIDTH])),
            offsets=shrink_integers(tiled(self.offsets(hint))),
            sizes=shrink_integers(tiled([_ROWS, _WIDTH])),
            kinds=((TensorKind("float32"), 4),),
            value_digests=np.ones(len(objects), dtype=np.uint32),
            own={f"per_rank.{rank}.random": (("per_rank", str(rank), "random"), True)},
        )

    def report(self, rank: int, save: int) -> SentReport:
        """Return the report of a rank on a save, as `shard_writer.write_shards` makes it."""
        stage, hint = divmod(rank, self.ranks_of_a_stage)
        random = np.random.default_rng((save, rank))
        count = self.tensors
        length = 4 * _ROWS * _WIDTH
        shard = np.arange(count, dtype=np.int64) * _SHARDS // count
        within = np.arange(count, dtype=np.int64) - np.searchsorted(shard, shard)
        of_shard = np.bincount(shard, minlength=_SHARDS).astype(np.int64)
        tables = of_shard * table_entries(length) * DIGEST_BYTES
        data_starts = 8 + 8 * (of_shard * (20 + len(str(hint)))) + tables
        keys = ShardNames(rank, origin=f"{save}.{save}.", token=random.bytes(8).hex())
        return RankReport(
            rank=rank,
            url=URL,
            shards=Shards(
                keys=tuple(keys.key(number) for number in range(_SHARDS)),
                sizes=data_starts + of_shard * length,
                data_starts=data_starts,
                table_lengths=tables,
                table_digests=random.bytes(_SHARDS * DIGEST_BYTES),
            ),
            put=_SHARDS,
            tensors=Tensors(
                names=self.names(stage),
                kinds=(TensorKind("float32"),),
                kind=np.zeros(count, dtype=np.int64),
                dimensions=np.full(count, 2, dtype=np.int64),
                shape=np.zeros(0, dtype=np.int64),
                chunks=np.ones(count, dtype=np.int64),
                chunk_offsets=np.tile(np.array(self.offsets(hint), dtype=np.int64), count),
                chunk_sizes=np.zeros(0, dtype=np.int64),
                chunk_pieces=np.ones(count, dtype=np.int64),
            ),
            chunk_hint=np.full(count, hint, dtype=np.int64),
            chunk_piece_first=np.arange(count, dtype=np.int64),
            pieces=Pieces(
                shard=shard,
                start=data_starts[shard] + within * length,
                length=np.full(count, length, dtype=np.int64),
                table=within * table_entries(length),
                digests=random.bytes(count * DIGEST_BYTES),
            ),
            inline={f"per_rank.{rank}.random": b'"%s"' % bytes(100).hex().encode()}
            | ({"step": b"%d" % save} if rank == 0 else {}),
            stored=(),
            first_blocks=b"",
            live_bytes=np.zeros(0, dtype=np.int64),
        ).to_sent()


@dataclass(slots=True)
class Cost:
    """Cost of the phases of a save, in seconds."""

    cpu_seconds: dict[str, float] = field(default_factory=dict)
    hold_seconds: dict[str, float] = field(default_factory=dict)
    sent_bytes: int = 0
    manifest_bytes: int = 0
    peak_bytes: int = 0  # memory of the process at most, beyond that before, in which the messages of the ranks are
    kept_bytes: int = 0  # memory afterwards, for the next save

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure a block."""
        with _Ticker() as ticker:
            began = time.process_time()
            yield
            self.cpu_seconds[phase] = time.process_time() - began
        self.hold_seconds[phase] = ticker.longest_seconds


class _Ticker(threading.Thread):
    """Thread that takes the interpreter each millisecond, as training would, and notes the longest wait for it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_seconds = 0.0
        self._watched = threading.get_native_id()
        self._ends = threading.Event()

    def run(self) -> None:
        """Take the interpreter until the block ends."""
        before, waited = time.monotonic(), self._waited_seconds()
        while not self._ends.is_set():
            time.sleep(_TICK_SECONDS)
            now, waited_now = time.monotonic(), self._waited_seconds()
            self.longest_seconds = max(self.longest_seconds, now - before - (waited_now - waited) - _TICK_SECONDS)
            before, waited = now, waited_now

    def _waited_seconds(self) -> float:
        """Return for how long the system let this thread and the watched one wait for a processor."""
        tasks = (threading.get_native_id(), self._watched)
        return sum(int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1]) for task in tasks) / 1e9

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()


def _reset_peak() -> int:
    """Begin to measure the peak of memory anew; return the memory in use."""
    used_bytes = _used_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    return used_bytes


def _used_bytes() -> int:
    """Return the memory of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def plan(layout: Layout, cost: Cost) -> Planned:
    """Plan the first save."""
    sent = [pickle.dumps(layout.table(rank)) for rank in range(layout.ranks)]
    before = _reset_peak()
    with cost.timed("unpickle"):
        tables: list[PlanTable] = list(map(pickle.loads, sent))
    with cost.timed("arrange"):
        planned = arrange(tables, compared=()).planned
    cost.sent_bytes, cost.peak_bytes = sum(map(len, sent)), _status_bytes("VmHWM") - before
    del tables
    cost.kept_bytes = _used_bytes() - before
    return planned


def commit(layout: Layout, planned: Planned, save: int) -> Cost:
    """Commit a save; the rank of the coordinator does not pickle its own report."""
    cost, own = Cost(), layout.report(0, save)
    seconds = Seconds(staging=1.5, planning=0.5, uploading=9.5)
    figures = [
        RankFigures(
            rank,
            UploadStats(slowest_shard=f"shards/{rank}", slowest_seconds=1.5),
            requests=_SHARDS,
            seconds=seconds,
        )
        for rank in range(layout.ranks)
    ]
    sent = [pickle.dumps((layout.report(rank, save), figures[rank])) for rank in range(1, layout.ranks)]
    cost.sent_bytes = sum(map(len, sent))
    before = _reset_peak()
    with cost.timed("unpickle"):
        parts: list[tuple[SentReport, RankFigures]] = [(own, figures[0]), *map(pickle.loads, sent)]
    with cost.timed("assemble"):
        reports = [report for report, _ in parts]
        segment_bytes: list[int] = []
        manifest, body = assemble_manifest(
            planned,
            reports,
            url=URL,
            save_id=f"{save:032x}",
            segment_names=ShardNames(0),
            put=lambda _, parts: segment_bytes.append(sum(map(len, parts))),
        )
    with cost.timed("orphans"):
        assert not find_orphaned_shards(manifest, reports)
    with cost.timed("combine"):
        combine(
            [of_rank for _, of_rank in parts], step=save, save_id=manifest.save_id, total_bytes=manifest.total_bytes
        )
    cost.manifest_bytes = len(body) + sum(segment_bytes)
    cost.peak_bytes = _status_bytes("VmHWM") - before
    del parts, figures, reports, manifest, body
    cost.kept_bytes = _used_bytes() - before
    return cost


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the costs of two saves as JSON; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.clients.commit_cost", description=__doc__)
    parser.add_argument("--data-parallel", type=int, default=16)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--tensors", type=int, default=214, help="tensors of a stage")
    parser.add_argument("--freeze", action="store_true", help="take what is imported out of full collections")
    options = parser.parse_args(arguments)
    if options.freeze:
        gc.freeze()
    layout, costs = Layout(options.data_parallel, options.stages, options.tensors), [Cost()]
    with short_switch_interval():
        planned = plan(layout, costs[0])
        costs += [commit(layout, planned, save) for save in (1, 2)]
    for what, cost in zip(("plan", "save 1", "save 2"), costs, strict=True):
        sys.stdout.write(
            f"{what}: CPU {sum(cost.cpu_seconds.values()):.2f} s: {_rounded(cost.cpu_seconds)}; longest hold "
            f"{_rounded(cost.hold_seconds)}; received {cost.sent_bytes / 1e6:.1f} MB, manifest "
            f"{cost.manifest_bytes / 1e6:.1f} MB, peak {cost.peak_bytes / 1e6:.0f} MB, kept "
            f"{cost.kept_bytes / 1e6:.0f} MB\n"
        )


def _rounded(seconds: dict[str, float]) -> str:
    return ", ".join(f"{phase} {value:.3f}" for phase, value in seconds.items())


if __name__ == "__main__":
    main()
