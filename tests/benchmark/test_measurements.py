"""Measurements of a small state: every client saves and loads it, in processes of its own."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dcp_remote.common.units import MiB
from tests.benchmark.clients import raw
from tests.benchmark.clients.clients import CLIENTS
from tests.benchmark.clients.processes import StepFailedError, measure_step, run_ranks
from tests.benchmark.clients.state import LARGE, SHAPES, SMALL, local_tensors, require_loaded, size_bytes, state_of
from tests.benchmark.clients.worker import Task
from tests.benchmark.report.plan import BEST, CONNECTOR, OURS, RAW, Group, Section, Step
from tests.benchmark.run import about_this_machine, rows
from tests.benchmark.server.server import BenchServer, bench_server
from tests.support.ceph import ceph_is_installed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server needs Linux's sendfile and shared memory")

SMALL_BYTES = size_bytes(state_of(SMALL, filled=False))

needs_connector = pytest.mark.skipif(
    importlib.util.find_spec("s3torchconnector") is None, reason="pip install 'dcp-remote[bench]'"
)
# Settings differ in nothing that TLS has to do with.
NAMES = [
    pytest.param(name, protocol, marks=needs_connector if name.startswith(CONNECTOR) else (), id=f"{name}-{protocol}")
    for name in CLIENTS
    for protocol in (("http", "tls") if name in (OURS, RAW) or name.endswith(BEST) else ("http",))
]


@pytest.fixture(scope="module")
def http() -> Iterator[BenchServer]:
    with bench_server(size_bytes=128 * MiB) as server:
        yield server


@pytest.fixture(scope="module")
def tls() -> Iterator[BenchServer]:
    with bench_server(size_bytes=128 * MiB, tls=True) as server:
        yield server


def section(*groups: Group) -> Section:
    return Section("tiny", "small", groups, rounds=1, server_bytes=64 * MiB)


def task(server: BenchServer, step: Step, client: str = OURS) -> Task:
    return Task(client, step, "s3://bench/checkpoint", "small", dict(server.storage_options))


@pytest.mark.torture(smoke=False)
@pytest.mark.parametrize(("client", "protocol"), NAMES)
def test_client_loads_what_it_saved(client: str, protocol: str, request: pytest.FixtureRequest) -> None:
    """Bit for bit, which the process that loads looks at; the server saw at least these bytes, both ways."""
    server: BenchServer = request.getfixturevalue(protocol)
    server.clear()
    group = Group(client, (Step("save"), Step("load")))
    saved, loaded = (
        measure_step(server, section(group), group, step, round_=0, seconds_max=60) for step in group.steps
    )
    assert saved.failed is None
    assert loaded.failed is None
    assert saved.state_bytes == loaded.state_bytes == SMALL_BYTES
    assert saved.sent_bytes >= SMALL_BYTES <= loaded.got_bytes
    assert min(saved.wall_seconds, saved.cpu_seconds, loaded.cpu_seconds) > 0


def test_state_is_what_it_says_it_is() -> None:
    """The large one has tensors from 4 bytes to 200 MiB; another value than that which was saved is found."""
    sizes = [4 * torch.Size(size).numel() for _, size in LARGE.parameters()]
    assert max(sizes) == 200 * MiB
    assert state_of(SMALL, filled=True)["optim"]["state"]["norm.weight"]["step"].nbytes == 4
    assert all(shape.layers > 0 for shape in SHAPES.values())
    state = state_of(SMALL, filled=True)
    require_loaded(state, SMALL)
    local_tensors(state)[-2].view(-1)[-1] += 1
    with pytest.raises(AssertionError, match="not loaded as it was saved"):
        require_loaded(state, SMALL)


@pytest.mark.torture(smoke=False)
def test_ranks_share_a_state(http: BenchServer) -> None:
    """Saved by two, loaded by one, which reads hardly more than the state: figures are of all ranks together."""
    http.clear()
    group = Group(OURS, (Step("save", 2), Step("load", 1)))
    saved, loaded = (measure_step(http, section(group), group, step, round_=0) for step in group.steps)
    assert saved.failed is None
    assert loaded.failed is None
    steps = 4 * len(list(SMALL.parameters()))  # are replicated: each rank has them all
    assert saved.state_bytes == SMALL_BYTES + steps
    assert loaded.got_bytes <= 1.05 * SMALL_BYTES


@pytest.mark.torture(smoke=False)
def test_background_saves_and_training(http: BenchServer) -> None:
    """Both count what they are about; nothing is said of how long it took."""
    http.clear()
    (background,) = run_ranks(task(http, Step("background")), seconds_max=60)
    assert 0 < background.blocked_seconds < background.wall_seconds
    http.clear()
    (trained,) = run_ranks(task(http, Step("train", beside="process")), seconds_max=120)
    assert trained.saves > 0
    assert trained.alone_steps_per_second > 0
    assert trained.first_blocked_seconds > 0


def test_a_second_save(http: BenchServer) -> None:
    """A save before it, of the same process, is no part of it: it counts one."""
    http.clear()
    group = Group(OURS, (Step("again"),))
    row = measure_step(http, section(group), group, group.steps[0], round_=0)
    assert row.failed is None
    assert row.state_bytes == SMALL_BYTES
    assert row.sent_bytes >= 2 * SMALL_BYTES, "the server saw both"


@pytest.mark.torture(smoke=False)
@pytest.mark.skipif(not ceph_is_installed(), reason="Ceph 16 is not installed; tests/support/ceph.py says how")
def test_ceph_in_the_place_of_the_server() -> None:
    """A new one for each group; what it does not count is not made up."""
    group = Group(OURS, (Step("save"), Step("load")))
    for row in rows([replace(section(group), ceph=True)]):
        assert row.failed is None
        assert row.wall_seconds > 0
        assert row.requests == row.sent_bytes == row.got_bytes == 0


def test_failure_is_a_row_with_a_reason(http: BenchServer) -> None:
    """A checkpoint that is not there; and two ranks of which one raises: nobody waits for the other."""
    http.clear()
    group = Group(OURS, (Step("load"),))
    row = measure_step(http, section(group), group, group.steps[0], round_=0)
    assert row.failed is not None
    assert "CheckpointNotFoundError" in row.failed
    with pytest.raises(StepFailedError, match="No end after 0 s"):
        run_ranks(task(http, Step("save")), seconds_max=0.01)


def test_rows_of_a_plan() -> None:
    """In the order of the plan; what follows a failure in its group is left out."""
    with_failure = Group(OURS, (Step("load"), Step("save")))
    found = list(rows([section(Group(RAW, (Step("save"), Step("load"))), with_failure)], verify=False))
    assert [(row.client, row.action, row.failed is None) for row in found] == [
        (RAW, "save", True),
        (RAW, "load", True),
        (OURS, "load", False),
    ]


def test_about_names_nobody() -> None:
    about = about_this_machine()
    assert platform.node() not in str(about)
    assert about["cores"] > 0


def test_socket_moves_what_lies_across_views(http: BenchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards and ranges that begin and end within a view, empty views, and one that is a range exactly."""
    monkeypatch.setattr(raw, "SHARD_BYTES", 100)
    monkeypatch.setattr(raw, "RANGE_BYTES", 30)
    http.clear()
    parts = [bytes(range(size)) for size in (7, 0, 133, 30, 60, 1)]
    raw.put_all(http.endpoint_url, raw.pack([memoryview(part) for part in parts], "/bench/raw"), ca_file=None)
    into = [bytearray(len(part)) for part in parts]
    raw.get_all(http.endpoint_url, raw.pack([memoryview(part) for part in into], "/bench/raw"), ca_file=None)
    assert into == parts
