"""Memory of a save and a load above the state, over a real connection, where a copy would show.

A process of its own saves 256 MiB and loads them again, and reads the peak of its resident memory from the kernel. Its
client has written and read a shard before, so that memory kept by libraries is not counted.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.common.units import KiB, MiB
from tests.benchmark.server.server import bench_server

STATE_BYTES = 256 * MiB

# A copy of one shard is 64 MiB, of the pending ranges 128 MiB. The rest is threads, sockets and TLS.
ABOVE_MAX_BYTES = 24 * MiB


def resident(field: str) -> int:
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * KiB


def above(action: str, url: str, state: dict[str, torch.Tensor], options: dict[str, str]) -> int:
    """Return the peak of resident memory in a save or a load above that before, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS:")
    if action == "save":
        dcp.save(state, storage_writer=RemoteWriter(url, storage_options=options), no_dist=True)
    else:
        dcp.load(state, storage_reader=RemoteReader(url, storage_options=options), no_dist=True)
    return resident("VmHWM:") - before


def main(tls: str) -> None:
    """Print the memory that save and load took, in a process of its own."""
    with bench_server(size_bytes=1024 * MiB, tls=tls == "tls") as server:
        options = server.storage_options
        warm = {"w": torch.ones(16 * MiB)}
        above("save", "s3://bench/warm", warm, options)
        above("load", "s3://bench/warm", warm, options)
        del warm
        # Many sizes, each contiguous: 200 MiB in one tensor, the rest in fifty.
        state = {"large": torch.arange(50 * MiB, dtype=torch.float32)}
        state |= {f"small.{number}": torch.full((7 * MiB // 25,), float(number)) for number in range(50)}
        assert abs(sum(tensor.nbytes for tensor in state.values()) - STATE_BYTES) < MiB
        saved = above("save", "s3://bench/state", state, options)
        expected = {name: float(tensor.double().sum()) for name, tensor in state.items()}
        for tensor in state.values():
            tensor.zero_()
        loaded = above("load", "s3://bench/state", state, options)
        assert {name: float(tensor.double().sum()) for name, tensor in state.items()} == expected
    sys.stdout.write(f"{saved} {loaded}\n")


@pytest.mark.torture(smoke=False)
@pytest.mark.parametrize("tls", ["http", "tls"])
def test_nothing_is_copied(tls: str) -> None:
    """Save and load of 256 MiB stay within 24 MiB, with the checksum of each put."""
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, tls],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    saved, loaded = map(int, answer.stdout.split())
    assert max(saved, loaded) <= ABOVE_MAX_BYTES, f"save {saved / MiB:.0f} MiB, load {loaded / MiB:.0f} MiB"


if __name__ == "__main__":
    main(sys.argv[1])
