"""Reports: combined figures of the ranks, and their log lines."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest

from dcp_remote.common.units import MiB
from dcp_remote.manager.reports import (
    LoadReport,
    LoadSeconds,
    RankFigures,
    SaveReport,
    Seconds,
    SlowRank,
    SlowShard,
    combine,
)
from dcp_remote.saving.rank_report import UploadStats

GiB = 1024 * MiB

SAVE_ID = "0123456789abcdef0123456789abcdef"

# Rank 1 copies slowly, so that the others wait in planning; rank 2 uploads slowest; rank 0 commits.
FIGURES = [
    RankFigures(0, UploadStats(10, 5, 0, "shards/c", 1.5), 4, Seconds(0.5, 1.0, 3.0, 2.0, 0.25)),
    RankFigures(1, UploadStats(20, 0, 1, "shards/b", 0.75), 3, Seconds(0.5, 3.5, 0.5, 3.0)),
    RankFigures(2, UploadStats(30, 7, 2, "shards/a", 4.0), 2, Seconds(0.0, 1.0, 3.5, 5.0)),
    RankFigures(3, UploadStats(0, 60), 0, Seconds(0.25, 0.75, 3.5, 0.0)),
]


def test_combined() -> None:
    """Combine four ranks in several orders: sums, the slowest, and phases that add up to the time that passed."""
    expected = SaveReport(
        step=7,
        save_id=SAVE_ID,
        world_size=4,
        total_bytes=132,
        written_bytes=60,
        deduplicated_bytes=72,
        seconds=Seconds(0.5, 3.5, 0.5, 5.0, 0.25),
        requests=9,
        retries=3,
        slowest_rank=SlowRank(1, 6.5),
        slowest_shard=SlowShard("shards/a", 4.0, 2),
    )
    # All ranks have the plan 4.5 s after the call, rank 2 has uploaded 5 s later, and rank 0 commits.
    assert expected.seconds.total == 4.5 + 5.0 + 0.25
    assert expected.seconds.blocked == 4.0
    for seed in range(4):
        shuffled = random.Random(seed).sample(FIGURES, len(FIGURES))
        report = combine(shuffled, step=7, save_id=SAVE_ID, total_bytes=132)
        assert report == expected


def test_nothing_was_put() -> None:
    """Name a slowest rank but no slowest shard if all bytes were in the bucket already."""
    report = combine([RankFigures(0, UploadStats(reused_bytes=5))], step=0, save_id=SAVE_ID, total_bytes=5)
    assert (report.slowest_shard, report.slowest_rank) == (None, SlowRank(0, 0.0))
    assert (report.attempts, report.background) == (1, True)


REPORT = replace(
    combine(FIGURES, step=1000, save_id=SAVE_ID, total_bytes=12 * GiB + 300 * MiB),
    world_size=8,
    deduplicated_bytes=11 * GiB + 900 * MiB,
    seconds=Seconds(0.1, 0.2, 0.9, 12.5, 0.5),
    retries=0,
)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (REPORT, "saved step 1000: 12.3 GiB by 8 ranks in 14.2 s (0.3 s of it blocked), 11.9 GiB not sent again"),
        (
            replace(REPORT, deduplicated_bytes=0, world_size=1, background=False),
            "saved step 1000: 12.3 GiB by 1 rank in 14.2 s",
        ),
        (
            replace(REPORT, deduplicated_bytes=0, attempts=2, retries=3, requests=40),
            (
                "saved step 1000: 12.3 GiB by 8 ranks in 14.2 s (0.3 s of it blocked)"
                ", 2 attempts, 3 of 40 requests repeated"
            ),
        ),
        (
            LoadReport(1000, SAVE_ID, 8, 3, 4 * GiB + 100 * MiB, LoadSeconds(0.2, 3.0), 520, 0),
            "loaded step 1000: read 4.1 GiB in 3.2 s as one of 3 ranks; 8 ranks had saved it",
        ),
        (
            LoadReport(1000, SAVE_ID, 8, 3, 4 * GiB, LoadSeconds(0.2, 3.0), 520, 0, received_bytes=8 * GiB),
            (
                "loaded step 1000: read 4.0 GiB in 3.2 s as one of 3 ranks, received 8.0 GiB from the others"
                "; 8 ranks had saved it"
            ),
        ),
        (
            LoadReport(0, SAVE_ID, 1, 1, 10, LoadSeconds(0.0, 0.04), 2, 1),
            "loaded step 0: read 10 B in 0.0 s, 1 of 2 requests repeated; 1 rank had saved it",
        ),
    ],
)
def test_one_line(report: SaveReport | LoadReport, line: str) -> None:
    """Leave zeros and defaults out of the line."""
    assert str(report) == line


@pytest.mark.parametrize("record", [*FIGURES, REPORT, LoadReport(1, SAVE_ID, 8, 3, 4, LoadSeconds(0.2, 3.0), 5, 0)])
def test_records_cross_ranks(record: RankFigures | SaveReport | LoadReport) -> None:
    """Pickle and unpickle each record, as ranks do to exchange figures."""
    assert pickle.loads(pickle.dumps(record)) == record
