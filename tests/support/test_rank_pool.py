"""The pool of ranks: calls, failures and hangs of a rank, none of which affects later calls."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_remote.errors import SaveFailedError
from tests.support.rank_pool import RankPool, RanksFailedError


def reduced(number: int) -> int:
    tensor = torch.tensor(number + dist.get_rank())
    dist.all_reduce(tensor)
    return int(tensor)


def sharded_product(rows: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2)
    product = distribute_tensor(whole, mesh, [Shard(0)]).t() @ distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(product, DTensor)
    return product.full_tensor()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise SaveFailedError("On purpose.", rank=rank)
    return dist.get_rank()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()


def hang_on(rank: int) -> int:
    if dist.get_rank() == rank:
        threading.Event().wait()
    return dist.get_rank()


def listening_addresses() -> list[str]:
    """Return the local addresses of this process's listening sockets, from Linux's tables."""
    inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def test_ranks_of_a_call_join_one_group(rank_pool: RankPool) -> None:
    """All, or some in any order, as ranks 0, 1, … of a group of their own; the same processes serve every size."""
    pids = rank_pool.run(os.getpid)
    assert rank_pool.run(os.getpid, ranks=(3, 1)) == [pids[3], pids[1]]
    assert rank_pool.run(torch.get_num_threads) == [1] * 4
    for world_size in (1, 3, 2, 4):
        assert rank_pool.run(dist.get_rank, ranks=range(world_size)) == list(range(world_size))
        assert rank_pool.run(reduced, 0, ranks=range(world_size)) == [sum(range(world_size))] * world_size
    assert rank_pool.run(os.getpid) == pids


def test_tensors_on_a_mesh_survive_a_change_of_world_size(rank_pool: RankPool) -> None:
    """Tensors on a mesh are right in every later group: torch's caches know layouts by mesh, not by group."""
    whole = torch.arange(12, dtype=torch.float64).reshape(6, 2)
    for world_size in (2, 3, 2, 4, 2):
        for product in rank_pool.run(sharded_product, 6, ranks=range(world_size)):
            assert torch.equal(product, whole.t() @ whole)


def test_an_exception_is_raised_with_the_traceback_of_its_rank(rank_pool: RankPool) -> None:
    """If one rank of three raises, the failure has its error and the others' results, and the processes stay."""
    pids = rank_pool.run(os.getpid)
    with pytest.raises(RanksFailedError, match=r"(?s)rank 2: Traceback.*fail_on.*On purpose") as caught:
        rank_pool.run(fail_on, 2, ranks=(0, 1, 2))
    assert caught.value.results == {0: 0, 1: 1}
    error = caught.value.failures[2].error
    assert isinstance(error, SaveFailedError)
    assert error.details == {"rank": 2}
    assert rank_pool.run(os.getpid) == pids


def test_a_rank_that_dies_is_named_and_replaced(rank_pool: RankPool) -> None:
    """A rank that kills itself during a collective is named; the next call has all ranks again."""
    pids = rank_pool.run(os.getpid)
    with pytest.raises(RanksFailedError, match="rank 1: the process was ended by SIGKILL") as caught:
        rank_pool.run(die_on, 1, ranks=(0, 1))
    assert caught.value.failures[1].signal == signal.SIGKILL
    assert isinstance(caught.value.failures[0].error, RuntimeError)  # raised by gloo
    after = rank_pool.run(os.getpid)
    assert [old == new for old, new in zip(pids, after, strict=True)] == [True, False, True, True]
    assert rank_pool.run(reduced, 0) == [6] * 4


def test_a_rank_that_crashes_tells_its_calls_and_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    """All calls of the process are named, oldest first: the damage of an earlier call may show in a later one."""
    with RankPool(2) as pool:
        pool.run(reduced, 0)
        with pytest.raises(RanksFailedError) as caught:
            pool.run(abort_on, 0, ranks=(1,))
    failure = caught.value.failures[0]
    assert failure.signal == signal.SIGABRT
    named = [line.split(".")[-1] for line in failure.description.splitlines()[1:]]
    assert named == ["reduced as rank 1 of 2", "abort_on as rank 0 of 1"]
    assert "in abort_on" in capfd.readouterr().err


@pytest.mark.torture(smoke=False)
def test_a_rank_that_hangs_is_killed_and_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    """A hung rank prints its stacks and is killed at the call's timeout; the other rank keeps result and process."""
    with RankPool(2) as pool:
        pids = pool.run(os.getpid)
        with pytest.raises(RanksFailedError, match="rank 1: killed, because it did not return within 1 s") as caught:
            pool.run(hang_on, 1, timeout_seconds=1)
        assert caught.value.results == {0: 0}
        after = pool.run(os.getpid)
    assert (after[0] == pids[0], after[1] == pids[1]) == (True, False)
    assert "in hang_on" in capfd.readouterr().err


@pytest.mark.torture(smoke=False)
def test_ranks_end_with_their_parent() -> None:
    code = (
        "import os, signal, sys\n"
        "from tests.support.rank_pool import RankPool\n"
        "RankPool(1).run(os.getpid)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    reading, writing = os.pipe()
    try:
        # The rank inherits standard error, so that the pipe ends when both processes have.
        parent = subprocess.Popen([sys.executable, "-c", code], stderr=writing, stdout=subprocess.DEVNULL)
        os.close(writing)
        assert parent.wait(timeout=60) == -signal.SIGKILL
        ready, _, _ = select.select([reading], [], [], 30)
        assert ready, "the rank still runs"
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")
def test_ranks_listen_on_the_loopback_interface_alone(rank_pool: RankPool) -> None:
    """Ranks listen on the loopback interface alone; gloo opens a listening socket for each group."""
    rank_pool.run(reduced, 0, ranks=(0, 1))
    loopback = {f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"}
    for addresses in rank_pool.run(listening_addresses, ranks=(0, 1)):
        assert addresses
        assert set(addresses) <= loopback | {"00000000000000000000000001000000"}


@pytest.mark.torture(smoke=False)
def test_a_group_that_cannot_be_made_does_no_harm_later() -> None:
    """A rank stopped before it joins fails that group; later calls have all ranks in one group again."""
    with RankPool(2, group_timeout_seconds=6.0) as pool:
        assert pool.run(reduced, 1) == [3, 3]
        stopped = pool.pids[1]
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(RanksFailedError) as caught:
            pool.run(reduced, 1, timeout_seconds=10.0)
        assert set(caught.value.failures) == {0, 1}
        assert stopped not in pool.pids
        assert pool.run(reduced, 1) == [3, 3]
        assert pool.run(reduced, 2) == [5, 5]
