"""A process whose store does not answer ends in time: within the notice after SIGTERM, and at the second Ctrl-C.

Each case is a process of its own, in which an alarm set by the signal kills the job at the end of its notice.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dcp_remote import CheckpointManager
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import SaveTimeoutError
from dcp_remote.manager.preemption import Preemption
from dcp_remote.storage import MemoryStore
from tests.support.rank_threads import Clock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")

NOTICE_SECONDS = 20.0

BEGINNING = f"""
import signal, sys, threading, time
import torch
from dcp_remote import CheckpointManager
from dcp_remote.storage import LocalStore
from dcp_remote.storage.wrapper import WrappedStore

class Stalled(WrappedStore):
    def _request(self, request, send):
        if request.verb == "put" and request.key.startswith(sys.argv[2]):
            print("stalled", flush=True)
            time.sleep(1e6)
        return send()

def killed_at_the_end_of_the_notice(number, frame):
    signal.setitimer(signal.ITIMER_REAL, {NOTICE_SECONDS})

signal.signal(signal.SIGTERM, killed_at_the_end_of_the_notice)
signal.signal(signal.SIGINT, signal.default_int_handler)
checkpoints = CheckpointManager(Stalled(LocalStore(sys.argv[1])), notice_seconds={NOTICE_SECONDS})
checkpoints.reached_preemption(0)
checkpoints.save(1, {{"w": torch.ones(1000)}})
"""


@contextmanager
def process(path: Path, prefix: str, script: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose first save hangs."""
    code = BEGINNING + textwrap.dedent(script)
    command = [sys.executable, "-c", code, str(path), prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "stalled\n"
            yield child
        finally:
            child.kill()


def processes(folder: Path, cases: Sequence[tuple[str, str]], stack: ExitStack) -> list[subprocess.Popen[str]]:
    """Start a process for each case of a prefix and a script, all at a time."""
    with ThreadPoolExecutor(len(cases)) as pool:
        begun = [
            pool.submit(stack.enter_context, process(folder / str(number), *case)) for number, case in enumerate(cases)
        ]
        return [one.result() for one in begun]


@pytest.mark.torture(smoke=False)
def test_sigterm(tmp_path: Path) -> None:
    """After SIGTERM the process ends before it is killed, and says why, whatever it waits for and whatever hangs."""
    cases = {
        ("shards/", "checkpoints.wait()"): "SaveTimeoutError",
        ("manifests/", "checkpoints.close()"): "CommitUnknownError",
        ("shards/", ""): "SaveTimeoutError",  # at the end of the process
    }
    with ExitStack() as stack:
        children = processes(tmp_path, list(cases), stack)
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child, (case, error) in zip(children, cases.items(), strict=True):
            _, told = child.communicate(timeout=100)
            assert child.returncode == 1, (case, told)
            assert error in told, (case, told)


@pytest.mark.torture(smoke=False)
def test_ctrl_c_twice(tmp_path: Path) -> None:
    """The first Ctrl-C logs what is waited for, and until when; the second ends the process half an hour earlier."""
    cases = [
        ("shards/", "with checkpoints: time.sleep(1e6)"),
        ("manifests/", "time.sleep(1e6)"),
        ("manifests/", "checkpoints.close()"),
        ("shards/", "checkpoints.wait()"),
    ]
    with ExitStack() as stack:
        children = processes(tmp_path, cases, stack)
        for child in children:
            child.send_signal(signal.SIGINT)
        for child, case in zip(children, cases, strict=True):
            assert child.stderr is not None
            told = ""
            while "waiting for the save of step 1, until" not in told:
                line = child.stderr.readline()
                assert line, (case, told)
                told += line
            child.send_signal(signal.SIGINT)
            _, rest = child.communicate(timeout=100)
            assert child.returncode not in (0, None), (case, told + rest)


def test_seconds_for_work() -> None:
    """Work gets the notice less eight seconds, or three fifths of a short notice; never less than zero."""
    for notice_seconds, work_seconds in ((30.0, 22.0), (10.0, 6.0)):
        clock = Clock()
        preemption = Preemption(RankGroup(0, 1, None), notice_seconds, clock=clock)
        assert preemption.working_seconds() == math.inf
        preemption.record_signal()
        assert preemption.working_seconds() == work_seconds
        clock.now += 5.0
        assert preemption.working_seconds() == work_seconds - 5.0
        clock.now += notice_seconds
        assert preemption.working_seconds() == 0.0


def test_a_process_that_outlives_its_notice_saves_and_restores() -> None:
    """A process that outlives its notice saves and restores as usual; the next SIGTERM is heard of like the first."""
    store, clock = MemoryStore(), Clock()
    with CheckpointManager(store, notice_seconds=1.0) as checkpoints:
        preemption = checkpoints._preemption
        preemption._clock = clock
        checkpoints.save(1, {"n": 1}, wait=True)
        preemption.record_signal()
        clock.now += 0.9
        with pytest.raises(SaveTimeoutError):
            checkpoints.save(2, {"n": 2}, wait=True)
        clock.now += 0.3
        checkpoints.save(2, {"n": 2}, wait=True)
        state = {"n": 0}
        assert checkpoints.restore(state) == 2
        assert state == {"n": 2}
        assert preemption.remaining_seconds() == math.inf
        assert [preemption.reached(step) for step in (3, 4)] == [True, False]
        preemption.record_signal()
        assert preemption.remaining_seconds() == 1.0
        assert [preemption.reached(step) for step in (5, 6)] == [True, False]


FORKED = """
import os, sys
import torch
import torch.distributed as dist
from dcp_remote import CheckpointManager
from dcp_remote.errors import InvalidArgumentError

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpoints = CheckpointManager(sys.argv[1])
state = {"w": torch.ones(10)}
checkpoints.save(1, state)
child = os.fork()
if child == 0:
    with checkpoints:
        saves = lambda: checkpoints.save(2, state), lambda: CheckpointManager(sys.argv[1], resumed_from=1)
        for call in (*saves, lambda: checkpoints.restore(state), checkpoints.wait):
            try:
                call()
            except InvalidArgumentError as error:
                assert "forked" in str(error), error
            else:
                os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
checkpoints.wait()
checkpoints.save(3, state, wait=True)
assert checkpoints.run.steps() == [1, 3]
checkpoints.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_that_is_forked_saves_nothing(tmp_path: Path) -> None:
    """As a worker of a DataLoader: it is no rank, its end changes nothing, and the parent's save under way goes on."""
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
