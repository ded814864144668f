"""Cost of planning and committing for the coordinator of many ranks: torch's own way against a manager's.

    python -m tests.benchmark.clients.scale --ranks 1024 --tensors 1000

All ranks are in one process, one after another, and every message between them goes through pickle, as it does with
real ones. Timed is what the coordinator does, in CPU seconds; counted are the bytes that cross, a broadcast once.
torch's way is `DefaultSavePlanner` without a cache, one `WriteResult` an item as its file system writer gives them, and
the metadata with all of these in it, written and broadcast. Nothing is stored, in either.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.units import MEMORY_BUDGET_BYTES
from dcp_remote.format.catalog import Attempt, Entry
from dcp_remote.format.shard import ShardNames
from dcp_remote.manager.coordinator import Committed
from dcp_remote.run.job import CheckpointLabels
from dcp_remote.saving.manifest_assembly import Planned, assemble_manifest, find_orphaned_shards
from dcp_remote.saving.plan_cache import PlanCache, RunPlanner, propose, to_rank_plan, to_table
from dcp_remote.saving.plan_table import PlanTable, Share, arrange
from dcp_remote.saving.rank_report import SentReport
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.storage import MemoryStore
from tests.support.simulated_ranks import LocalShards

_Value = TypeVar("_Value")

_URL = MemoryStore().url
_SAVE_ID = "0" * 32

# Of a chunk: values cost the coordinator nothing, but for their digests.
_ROWS, _WIDTH = 4, 8


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a plan: tensors sharded over all ranks, unevenly, and one in fifty replicated."""

    ranks: int
    tensors: int

    def state(self, rank: int) -> dict[str, Any]:
        """Return the state of one rank; its values are random, as digests that are equal would shrink."""
        generator = torch.Generator().manual_seed(rank)
        model: dict[str, Any] = {}
        for number in range(self.tensors):
            name = f"layers.{number // 10}.attention.{number % 10}.weight"
            if number % 50 == 0:
                model[name] = torch.rand(_ROWS, _WIDTH, generator=generator)
                continue
            rows = _ROWS * self.ranks - number % _ROWS
            first = min(_ROWS * rank, rows)
            chunk = torch.rand(min(_ROWS, rows - first), _WIDTH, generator=generator)
            model[name] = LocalShards((rows, _WIDTH), torch.float32, [((first, 0), chunk)])
        return {"model": model, "step": 1}


@dataclass(slots=True)
class Cost:
    """Cost of one save."""

    cpu_seconds: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add what a block takes."""
        began = time.process_time()
        yield
        self.cpu_seconds[what] = self.cpu_seconds.get(what, 0.0) + time.process_time() - began

    def gathered(self, what: str, values: Sequence[_Value]) -> list[_Value]:
        """From all ranks: pickled there, counted, and read by the coordinator."""
        return self.read(what, [pickle.dumps(value) for value in values])

    def read(self, what: str, pickled: Sequence[bytes]) -> list[Any]:
        """Bytes that ranks sent."""
        self.sent_bytes[what] = sum(map(len, pickled))
        with self.timed(f"reading {what}"):
            return [pickle.loads(data) for data in pickled]  # ours

    def sent(self, what: str, values: Sequence[object]) -> list[bytes]:
        """By the coordinator: to each rank its own, or one to all."""
        with self.timed(f"sending {what}"):
            pickled = [pickle.dumps(value) for value in values]
        self.sent_bytes[what] = sum(map(len, pickled))
        return pickled

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.cpu_seconds.values())

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.sent_bytes.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    """One save of torch's, and the first two of a manager's."""

    scale: Scale
    torchs: Cost
    first: Cost
    second: Cost

    @property
    def seconds_ratio(self) -> float:
        """Ratio of torch's CPU seconds to those of the second save."""
        return self.torchs.seconds / self.second.seconds

    @property
    def bytes_ratio(self) -> float:
        """Ratio of torch's bytes to those of the second save."""
        return self.torchs.total_bytes / self.second.total_bytes


def compare(scale: Scale, *, tell: Callable[[str], object] = lambda _: None) -> Comparison:
    """Measure both."""
    tell("torch plans and commits")
    torchs = _torchs(scale)
    tell("ours plans")
    first = Cost()
    plans, planned = _ours_planned(scale, first)
    tell("ranks write")
    reports = [_written(scale, rank, plan) for rank, plan in enumerate(plans)]
    del plans
    tell("ours commits, the first and the second time")
    _ours_committed(reports, planned, first)
    second = Cost()
    _ours_known(scale, second)
    _ours_committed(reports, planned, second)
    return Comparison(scale, torchs, first, second)


def _planner(scale: Scale, rank: int) -> RunPlanner:
    planner = RunPlanner()
    planner.set_up_planner(scale.state(rank))
    return planner


def _torchs(scale: Scale) -> Cost:
    cost, planner = Cost(), _planner(scale, 0)
    plans = cost.read("plans", [pickle.dumps(_planner(scale, rank).create_local_plan()) for rank in range(scale.ranks)])
    with cost.timed("planning"):
        plans, metadata = planner.create_global_plan(plans)
    cost.sent("final plans", plans)
    results = cost.gathered("results", [_torchs_results(rank, plan) for rank, plan in enumerate(plans)])
    del plans, planner
    with cost.timed("committing"):
        metadata.storage_data = {one.index: one.storage_data for written in results for one in written}
        pickle.dumps(metadata)
    cost.sent("metadata", [metadata])
    return cost


def _torchs_results(rank: int, plan: SavePlan) -> list[WriteResult]:
    """As torch/distributed/checkpoint/filesystem.py gives them."""
    length = 4 * _ROWS * _WIDTH
    return [
        WriteResult(item.index, length, _StorageInfo(f"__{rank}_0.distcp", number * length, length))
        for number, item in enumerate(plan.items)
    ]


def _ours_planned(scale: Scale, cost: Cost) -> tuple[list[SavePlan], Planned]:
    proposals = [propose(_planner(scale, rank)) for rank in range(scale.ranks)]
    tables: list[PlanTable] = cost.read("plans", [pickle.dumps(to_table(proposal)) for proposal in proposals])
    with cost.timed("planning"):
        arrangement = arrange(tables)
    sent = cost.sent("final plans", arrangement.shares)
    shares: list[Share] = [pickle.loads(share) for share in sent]  # ours
    plans = [to_rank_plan(proposal, share) for proposal, share in zip(proposals, shares, strict=True)]
    return plans, arrangement.planned


def _ours_known(scale: Scale, cost: Cost) -> None:
    """Return the messages of ranks that all have a plan: the save in which it was made."""
    proposal = propose(_planner(scale, 1))
    kept = PlanCache(_SAVE_ID, proposal)
    told = (CheckpointLabels(step=2), kept.key_of(propose(_planner(scale, 1))))
    heard = cost.gathered("keys of plans", [told] * scale.ranks)
    with cost.timed("planning"):
        assert all(key == _SAVE_ID for _, key in heard)
    entry = Entry(2, _SAVE_ID, "manifests/x.json", size_bytes=0, created="", token=1, began_revision=1)
    begun = Attempt(entry, _SAVE_ID)
    cost.sent("the beginning", [(begun, True)])


def _written(scale: Scale, rank: int, plan: SavePlan) -> bytes:
    planner = _planner(scale, rank)
    with Uploads[Any](
        MemoryStore(), rank=rank, deadline=Deadline(600), memory_budget_bytes=MEMORY_BUDGET_BYTES
    ) as uploads:
        report = write_shards(
            plan,
            planner,
            uploads,
            allow_pickle=False,
        )
    return pickle.dumps((report.to_sent(), report.figures))


def _ours_committed(reports: Sequence[bytes], planned: Planned, cost: Cost) -> None:
    heard: list[SentReport] = [report for report, _ in cost.read("reports", reports)]
    with cost.timed("committing"):
        names, put = ShardNames(0), MemoryStore().put
        manifest, _ = assemble_manifest(planned, heard, url=_URL, save_id=_SAVE_ID, segment_names=names, put=put)
        orphans = find_orphaned_shards(manifest, heard)
    cost.sent("the end", [Committed(_SAVE_ID, "manifests/x.json", manifest.total_bytes, orphans)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a comparison as JSON; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.clients.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=1000)
    options = parser.parse_args(arguments)
    compared = compare(Scale(options.ranks, options.tensors), tell=lambda what: sys.stderr.write(f"{what}\n"))
    ratios = {"seconds_ratio": compared.seconds_ratio, "bytes_ratio": compared.bytes_ratio}
    sys.stdout.write(json.dumps(asdict(compared) | ratios, indent=2) + "\n")


if __name__ == "__main__":
    main()
