"""What tests of several folders share, and the options and figures of the campaign against the core."""

from __future__ import annotations

import time
from collections.abc import Iterator

import hypothesis
import pytest

from dcp_remote.testing.servers import S3Server, moto_server
from tests.figures import figures

# For each part that could go on for ever (a fuzzer, random schedules). `make test` runs all of them that short.
_SECONDS = 2.0

_BEGAN = pytest.StashKey[float]()

# No example is too slow: on a busy machine any can be. All else as hypothesis has it, in CI always the same examples.
hypothesis.settings.register_profile("dcp_remote", deadline=None)
hypothesis.settings.load_profile("dcp_remote")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture-seconds",
        type=float,
        default=_SECONDS,
        help=f"time for each part of the campaign that has no end of its own (default {_SECONDS:g})",
    )


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
