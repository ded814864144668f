"""Memory that a save and a load take beyond the state: the budget, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import resource, sys, threading, torch
import torch.distributed.checkpoint as dcp
from dcp_remote import RemoteReader, RemoteWriter
MiB = 2**20

def now(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

def filled(value):
    # Touched, so that the pages count as state; and one tensor is not contiguous.
    return {"plain": torch.full((SIZE // 4,), value), "turned": torch.full((512, SIZE // 1024), value).t()}

warm = {"w": torch.ones(9)}
dcp.save(warm, storage_writer=RemoteWriter(URL + "/warm", overwrite=True), no_dist=True)
dcp.load(warm, storage_reader=RemoteReader(URL + "/warm"), no_dist=True)
state = filled(1.0 if ACTION == "save" else 0.0)
before = now("VmRSS:")
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")
if ACTION == "save":
    dcp.save(state, storage_writer=RemoteWriter(URL + "/x", memory_budget_bytes=BUDGET), no_dist=True)
else:
    dcp.load(state, storage_reader=RemoteReader(URL + "/x", memory_budget_bytes=BUDGET), no_dist=True)
print(now("VmHWM:") - before)
assert bool((state["plain"] == 1).all()) and bool((state["turned"] == 1).all())
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is reset through Linux's /proc"
)
def test_memory_beyond_the_state_is_the_budget(tmp_path: Path) -> None:
    """In a fresh process, save and load 128 MiB contiguous and 256 MiB not contiguous with a budget of 32 MiB.

    The peak of resident memory above the state stays below the budget and 32 MiB, which eight threads and what they
    are just copying take.
    """
    size_bytes, budget_bytes = 128 * 2**20, 32 * 2**20
    for action in ("save", "load"):
        settings = f"URL = 'file://{tmp_path}'\nSIZE = {size_bytes}\nBUDGET = {budget_bytes}\nACTION = {action!r}\n"
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", settings + MEASURE],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert int(result.stdout) < budget_bytes + 32 * 2**20, action
