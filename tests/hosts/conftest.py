"""The rig of a scenario, and the table of all outcomes, which is printed at the end for docs/tested.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.rig import Rig, reason_to_skip
from tests.hosts.scenario import Scenario

_ROW = "row of docs/tested.md"
_HEADER = ("| scenario | each rank | answer after, s | processes ended after, s |", "|---|---|---|---|")


@pytest.fixture(scope="session")
def _reason() -> str | None:
    return reason_to_skip()


@pytest.fixture
def scenario(request: pytest.FixtureRequest, tmp_path: Path, _reason: str | None) -> Iterator[Scenario]:
    """Start three hosts and a store, and note the outcome of the scenario."""
    if _reason is not None:
        pytest.skip(_reason)
    with Rig(tmp_path) as rig:
        scenario = Scenario(rig)
        yield scenario
        print("\n".join(job.show() for job in rig.jobs))  # noqa: T201  # shown by pytest if the scenario fails
    if scenario.outcome is not None:
        test, _, case = request.node.name.removeprefix("test_").rstrip("]").partition("[")
        name = f"{test.replace('_', ' ')}: {case.replace('-', ', ')}" if case else test.replace("_", " ")
        request.node.user_properties.append((_ROW, scenario.outcome.row(name)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = {report.nodeid for report in terminalreporter.getreports("passed")}
    # Of the teardown, whose reports count as neither passed nor failed.
    reports = [report for report in terminalreporter.getreports("") if report.nodeid in passed]
    rows = [value for report in reports for name, value in report.user_properties if name == _ROW]
    if rows:
        terminalreporter.section("several hosts")
        terminalreporter.write_line("\n".join([*_HEADER, *sorted(rows)]))
