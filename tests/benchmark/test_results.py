"""From rows to medians, goals, tables, and the README."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.common.units import GiB, MiB
from dcp_remote.errors import InvalidArgumentError
from tests.benchmark import run
from tests.benchmark.report import publish
from tests.benchmark.report.goals import Goal, goals
from tests.benchmark.report.plan import FULL, HTTP, OURS, PEERS, QUICK, RAW, TINY, TLS, TRAINING
from tests.benchmark.report.publish import (
    BEGIN,
    CHART,
    END,
    FOLDER,
    README,
    RESULTS,
    TABLES,
    document,
    readme_part,
    with_part,
    write,
)
from tests.benchmark.report.rows import Results, Row, median
from tests.benchmark.report.tables import failures, transfer_table

ABOUT = {
    "cores": 2,
    "processor": "one",
    "system": "Linux",
    "python": "3.11",
    "versions": "torch 2",
    "date": "2026-01-01",
    "seconds": 60,
}


def row(client: str, action: str, wall: float, *, cpu: float = 1.0, section: str = HTTP, round_: int = 0) -> Row:
    return Row(
        section=section,
        client=client,
        action=action,
        ranks=1,
        beside="nothing",
        round=round_,
        wall_seconds=wall,
        cpu_seconds=cpu,
        state_bytes=GiB,
        above_state_bytes=300 * MiB,
        got_bytes=GiB,
    )


ROWS = (
    row(OURS, "save", 1.0, cpu=0.4),
    row(OURS, "save", 9.0, cpu=0.4, round_=1),
    row(OURS, "save", 2.0, cpu=0.4, round_=2),
    row(RAW, "save", 1.0, cpu=0.2),
    row(PEERS[0], "save", 8.0),
    row(PEERS[1], "save", 7.0),
    replace(row(PEERS[1], "load", 0.0), failed="Traceback\n  a line\nError: it `broke`"),
)

# With the figures of the README.
PUBLISHED = (
    *ROWS,
    *(row(client, action, 3.0, section=TLS) for client in (OURS, *PEERS) for action in ("save", "load")),
    replace(row(OURS, "background", 1.0), blocked_seconds=0.25),
)


def named(results: Results) -> dict[str, Goal]:
    return {goal.what: goal for goal in goals(results)}


def test_json_and_back() -> None:
    """Every figure, to the last bit; a line for each row."""
    results = Results(ABOUT, ROWS)
    assert Results.from_json(results.to_json()) == results
    assert results.to_json().count("\n{") == len(ROWS)


def test_median_of_rounds_and_of_nothing() -> None:
    results = Results(ABOUT, ROWS)
    assert median(results.select(HTTP, OURS, "save"), lambda one: one.wall_seconds) == 2.0
    assert median(results.select(HTTP, PEERS[1], "load"), lambda one: one.wall_seconds) is None


def test_goals_compare_with_the_better_peer_and_with_the_socket() -> None:
    """Limits to both sides; what was not measured has no line."""
    found = named(Results(ABOUT, ROWS))
    faster = found["http, 1 rank: save faster than the better peer"]
    assert (faster.measured, faster.reached) == (3.5, True)
    cpu = found["http: client CPU of a save over the raw socket's"]
    assert (cpu.measured, cpu.reached) == (2.0, False)
    memory = found["memory above a state of 1.0 GiB in a save"]
    assert (memory.measured, memory.reached) == (300, False)
    assert not any("load" in what for what in found)


def test_training_lost_is_what_its_steps_took_longer() -> None:
    """Two saves in 4 s, at half of the speed: a second lost by each; the save itself needs 0.4 s of CPU."""
    disturbed = replace(
        row(OURS, "train", 4.0, section=TRAINING),
        beside="manager",
        steps_per_second=50.0,
        alone_steps_per_second=100.0,
        saves=2,
    )
    found = named(Results(ABOUT, (*ROWS, disturbed)))
    goal = found["training lost by a save in the background over the CPU that the save needs"]
    assert goal.measured == pytest.approx(2.5)
    assert not goal.reached


def test_table_tells_ratios_failures_and_nothing_else() -> None:
    """Seconds against ours, CPU against the socket's; who failed has a reason, and ours is compared with nobody."""
    results = Results(ABOUT, ROWS)
    lines = transfer_table(results, HTTP).splitlines()
    (ours,) = (line for line in lines if f"| {OURS} |" in line)
    assert "| 2.00 | – | 0.40 (2.0 ×) |" in ours.replace("failed", "–")
    (peer,) = (line for line in lines if PEERS[1] in line)
    assert "| 7.00 (3.5 ×) | failed |" in peer
    assert failures(results) == f"- {HTTP}, {PEERS[1]}, load: `Error: it 'broke'`"
    assert failures(results) in document(results)


def test_readme_without_a_place() -> None:
    with pytest.raises(InvalidArgumentError, match="no place"):
        with_part("before\nafter\n", "new")


def test_written_files_tell_the_same(tmp_path: Path) -> None:
    """The JSON that was written makes the tables that were written; the chart is a PNG."""
    write(Results(ABOUT, ROWS), tmp_path)
    again = Results.from_json((tmp_path / RESULTS).read_text(encoding="utf-8"))
    assert document(again) == (tmp_path / TABLES).read_text(encoding="utf-8")
    assert (tmp_path / CHART).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a README in place of the repository's."""
    monkeypatch.setattr(publish, "FOLDER", tmp_path)
    monkeypatch.setattr(publish, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    return tmp_path


def test_published(shown: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    results = tmp_path_factory.mktemp("run") / RESULTS
    results.write_text(Results(ABOUT, PUBLISHED).to_json(), encoding="utf-8")
    publish.main([str(results)])
    assert {path.name for path in shown.iterdir()} == {"README.md", RESULTS, TABLES, CHART}
    readme = (shown / "README.md").read_text(encoding="utf-8")
    assert readme == f"before\n{readme_part(Results(ABOUT, PUBLISHED))}\nafter\n"
    assert "a save takes 3.00 s, a load 3.00 s; the better peer 3.00 s and 3.00 s" in readme
    assert "at most 300.0 MiB; the peers 300.0 MiB and 300.0 MiB" in readme
    assert "waits** 0.25 s for a save in the background" in readme


def test_measurements_without_the_figures_of_the_readme(shown: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is written."""
    results = tmp_path_factory.mktemp("run") / RESULTS
    results.write_text(Results(ABOUT, ROWS).to_json(), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="not measured"):
        publish.main([str(results)])
    assert [path.name for path in shown.iterdir()] == ["README.md"]
    assert "old" in (shown / "README.md").read_text(encoding="utf-8")


def test_run_that_is_killed_keeps_the_sections_that_were_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, which nothing catches, in its second section."""

    class KilledError(BaseException):
        pass

    def rows(sections: Sequence[object]) -> Iterator[Row]:
        yield from ROWS
        yield row(OURS, "save", 1.0, section=TRAINING)
        raise KilledError

    monkeypatch.setattr(run, "rows", rows)
    with pytest.raises(KilledError):
        run.main(["--quick", "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [RESULTS]
    assert len(json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))["rows"]) == len(ROWS)


def test_what_is_shown_is_what_was_measured() -> None:
    """README.md and RESULTS.md are what the program makes of the committed measurements: no figure is typed in."""
    results = Results.from_json((FOLDER / RESULTS).read_text(encoding="utf-8"))
    assert readme_part(results) in README.read_text(encoding="utf-8")
    assert document(results) == (FOLDER / TABLES).read_text(encoding="utf-8")
    assert (FOLDER / CHART).is_file()


def test_every_section_interleaves_its_groups() -> None:
    """Each round does each group once; where there are several rounds, they do not all begin with the same one."""
    for section in FULL.values():
        turns = list(section.turns())
        for number in range(section.rounds):
            assert sorted(str(group) for round_, group in turns if round_ == number) == sorted(map(str, section.groups))
        if section.rounds > 1 and len(section.groups) > 1:
            assert turns[0][1] != turns[len(section.groups)][1]


def test_quick_is_a_part_of_it() -> None:
    """One round of each, of the same clients, and never of the largest state."""
    assert all(section.rounds == 1 and section.state in {"medium", "fewer", "tiny"} for section in QUICK.values())
    assert QUICK.keys() < FULL.keys()


def test_saves_that_return_early_have_goals_in_seconds() -> None:
    """Judge what two saves block, one copied before `save` returns and one later, and the CPU of a small save."""
    figures: dict[str, Any] = {"blocked_seconds": 0.05, "later_cpu_seconds": 0.02}
    rows = (
        replace(row(OURS, "background", 1.0), **figures),
        replace(row(OURS, "overlapped", 1.0), **figures),
        replace(row(OURS, "background", 1.0, section=TINY), **figures),
    )
    found = {what: (goal.measured, goal.reached) for what, goal in named(Results(ABOUT, rows)).items()}
    assert found == {
        "http: seconds that a save blocks the main thread, background": (0.05, True),
        "http: seconds that a save blocks the main thread, overlapped": (0.05, False),
        "1 MiB: CPU of a later save of a manager": (0.02, True),
    }
