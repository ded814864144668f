"""Fixtures of several folders, and the options and counts of the campaign against the core."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import is_hypothesis_test

from dcp_remote.common.tracebacks import FULL_NAME
from dcp_remote.testing.servers import S3Server, moto_server
from tests.support.faults import shorten_pauses
from tests.support.figures import figures
from tests.support.properties import load_profile
from tests.support.rank_pool import RankPool
from tests.support.rank_threads import wait_until

# Limit of each part that has no end of its own (a fuzzer, random schedules). `make test` runs all of them this short.
_SECONDS = 2.0

# `make test` runs the first and every n-th case of each parametrized test of the campaign.
_SMOKE_STEP = 8

# Of a test that fails, the frames of the package say most.
os.environ.setdefault(FULL_NAME, "1")

_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture-seconds",
        type=float,
        default=_SECONDS,
        help=f"time for each part of the campaign that has no end of its own (default {_SECONDS:g})",
    )
    parser.addoption(
        "--smoke",
        action="store_true",
        help=f"of each part of the campaign one case in {_SMOKE_STEP}, of each property a few examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config.getoption("--torture-seconds"), is_smoke=config.getoption("--smoke"))


@pytest.hookimpl(tryfirst=True)  # before the selection by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every property as a part of the campaign, which runs other examples; run real ranks in one process."""
    cases: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.function):
            item.add_marker(pytest.mark.torture)
        elif config.getoption("--smoke") and (torture := item.get_closest_marker("torture")) is not None:
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if not torture.kwargs.get("smoke", True) or (cases[function] - 1) % _SMOKE_STEP:
                left_out.append(item)
                continue
        # Real ranks share one pool, and the tests of a file its servers.
        group = "rank_pool" if "rank_pool" in getattr(item, "fixturenames", ()) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse versions of pytest-xdist and pytest that ignore the group: two pools on two cores are slow and late."""
    if getattr(session.config.option, "loadgroup", False):  # set in the workers of pytest-xdist
        for item in session.items:
            if item.get_closest_marker("xdist_group") is not None and "@" not in item.nodeid:
                raise pytest.UsageError(f"pytest-xdist does not know the group of this test. test={item.nodeid}")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEGAN] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not figures:
        return
    terminalreporter.section("the campaign against the core")
    seconds = round(time.monotonic() - config.stash[_BEGAN])
    for figure, number in [*sorted(figures.items()), ("seconds", seconds)]:
        terminalreporter.write_line(f"{number:>12,} {figure}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the figures of a worker of pytest-xdist to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = dict(figures)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Add the figures of a worker that has ended; a worker that crashed has none."""
    figures.update(getattr(node, "workeroutput", {}).get("figures", {}))


@pytest.fixture
def torture_seconds(request: pytest.FixtureRequest) -> float:
    """Return the limit of a part of the campaign that has no end of its own, in seconds."""
    seconds = request.config.getoption("--torture-seconds")
    assert isinstance(seconds, float)
    return seconds


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Start one S3 server for the whole session; tests take a bucket each."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Start four processes that live as long as the session; a test takes as many as it needs."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between attempts to milliseconds."""
    shorten_pauses(monkeypatch)


@pytest.fixture
def no_heartbeat_is_left() -> Iterator[None]:
    """Wait until the heartbeats that a test has left running have ended."""
    before = set(threading.enumerate())  # heartbeats of other tests of this process
    yield
    wait_until(
        lambda: not [one for one in threading.enumerate() if one.name == "dcp_remote-heartbeat" and one not in before]
    )
