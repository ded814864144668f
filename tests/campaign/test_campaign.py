"""A training under many faults, by real processes under torchrun and an S3 server; see `Campaign` and `FAULTS`."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from tests.campaign.campaign import Campaign
from tests.campaign.faults import FAULTS, killed_in_a_save
from tests.support.figures import LONG_SECONDS

# Faults of `make test`: each kind of consequence once, with few restarts.
SHORT = [
    "a connection is cut in mid-PUT",
    "the answer to the swap is lost",
    "a rank is stopped for a moment, in mid-upload",
    "orphans are removed in mid-upload",
    "killed before it hears that the swap was made: the coordinator",
]

SEED = 5


@pytest.mark.torture(smoke=False)
@pytest.mark.timeout(3600)
def test_a_training_under_faults_ends_as_one_without(tmp_path: Path, torture_seconds: float) -> None:
    """After each fault live checkpoints load as saved; at the end the state is that of an uninterrupted training."""
    whole = torture_seconds >= LONG_SECONDS
    names = list(FAULTS) if whole else SHORT
    random.Random(SEED).shuffle(names)
    with Campaign(tmp_path, SEED, world_size=3 if whole else 2) as campaign:
        campaign.begin()
        for name in names:
            campaign.suffer(name, FAULTS[name])
        campaign.finish()


@pytest.mark.torture(smoke=False)
@pytest.mark.timeout(1200)
def test_world_sizes_change_between_faults(tmp_path: Path, torture_seconds: float) -> None:
    """Killed during a save, and restored by more or fewer ranks, the shared state is the same to the last bit.

    A rank that existed before has its own random states again; a new rank keeps its own.
    """
    sizes = (3, 1, 2) if torture_seconds >= LONG_SECONDS else (1,)
    with Campaign(tmp_path, SEED, world_size=2) as campaign:
        campaign.begin()
        for world_size in sizes:
            campaign.suffer(
                f"killed in mid-upload, and restored by {world_size} ranks",
                partial(killed_in_a_save, who="all", moment="half", what="shard", live=False, world_size=world_size),
            )
        campaign.job.kill_all()
        campaign.check_that_gc_leaves_what_is_named()
