"""Jobs that are started again over one key-value store, as torchrun does: some processes are new, others survive."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # a backend without connections between ranks
from torch.distributed.distributed_c10d import _get_default_store

from tests.distributed.managed import Ended, ended, managing
from tests.support.rank_pool import RankPool, RanksFailedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as the other tests that kill ranks")

WORLD_SIZE = 3


def attempt(path: Path, step: int, failing: Sequence[int], killed: Sequence[int], late: Sequence[int]) -> Ended | None:
    """One attempt of a job: restore and save.

    Args:
        path: URL of the run; names the store that all attempts share.
        step: Step to save.
        failing: Ranks whose process dies before its first call.
        killed: Ranks whose process is killed a second after their first call, which waits for those that failed.
        late: Ranks that come a second later than the others.
    """
    rank, world_size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    dist.destroy_process_group()
    dist.init_process_group(
        "fake", store=dist.PrefixStore(f"attempts of {path}", store), rank=rank, world_size=world_size
    )
    if rank in failing:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in late:
        time.sleep(1.0)

    def job() -> None:
        with managing(
            path, silence_seconds=3.0, timeout_seconds=20.0, arrival_seconds=0.3 if failing else 4.0
        ) as manager:
            manager.restore(state())
            manager.save(step, state(), wait=True)

    def state() -> dict[str, object]:
        return {"n": step}

    if rank in killed:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(1)
    return ended(job)


@pytest.mark.torture
@pytest.mark.parametrize("late", [[], [0], [1, 2]])
@pytest.mark.parametrize(
    ("failing", "killed"),
    [
        ([1], [0, 2]),  # all processes are new, as under torchrun
        ([0], [1, 2]),
        ([0, 1, 2], []),
        ([1], []),  # the others survive
        ([0], []),
        ([1, 2], []),
    ],
)
def test_a_rank_that_fails_before_its_first_call(
    failing: list[int], killed: list[int], late: list[int], rank_pool: RankPool, tmp_path: Path
) -> None:
    """The next attempt restores and saves, whoever has counted what; and so does the one after it."""
    with pytest.raises(RanksFailedError) as caught:
        rank_pool.run(attempt, tmp_path, 0, failing, killed, [], ranks=range(WORLD_SIZE))
    assert sorted(caught.value.failures) == sorted(failing + killed), caught.value
    for step in (1, 2):
        assert rank_pool.run(attempt, tmp_path, step, [], [], late, ranks=range(WORLD_SIZE)) == [None] * WORLD_SIZE
