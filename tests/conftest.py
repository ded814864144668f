"""What tests of several folders share, and the options and figures of the campaign against the core."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import is_hypothesis_test

from dcp_remote.testing.servers import S3Server, moto_server
from tests.figures import figures
from tests.properties import load_profile

# For each part that could go on for ever (a fuzzer, random schedules). `make test` runs all of them that short.
_SECONDS = 2.0

_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture-seconds",
        type=float,
        default=_SECONDS,
        help=f"time for each part of the campaign that has no end of its own (default {_SECONDS:g})",
    )


def pytest_configure(config: pytest.Config) -> None:
    load_profile(config.getoption("--torture-seconds"))


@pytest.hookimpl(tryfirst=True)  # before what `-m` does not name is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every property is part of the campaign, which tries other examples."""
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.function):
            item.add_marker(pytest.mark.torture)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEGAN] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not figures:
        return
    terminalreporter.section("the campaign against the core")
    seconds = round(time.monotonic() - config.stash[_BEGAN])
    for figure, number in [*sorted(figures.items()), ("seconds", seconds)]:
        terminalreporter.write_line(f"{number:>12,} {figure}")


@pytest.fixture
def torture_seconds(request: pytest.FixtureRequest) -> float:
    """How long a part of the campaign that has no end of its own may take."""
    seconds = request.config.getoption("--torture-seconds")
    assert isinstance(seconds, float)
    return seconds


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for the whole session; tests take a bucket each."""
    with moto_server() as server:
        yield server
