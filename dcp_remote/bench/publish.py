"""From measurements to what is shown: tables in Markdown, a chart, and the README's part between two comments.

    python -m dcp_remote.bench.publish bench-output/results.json

writes `results.json`, `RESULTS.md` and `results.png` beside this file, and the part of README.md. Nothing of it is
written by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dcp_remote.bench.chart import draw
from dcp_remote.bench.goals import goals
from dcp_remote.bench.plan import BUSY, HTTP, RESHARDING, TLS, TRAINING
from dcp_remote.bench.rows import Results
from dcp_remote.bench.tables import (
    SHORT_COLUMNS,
    about,
    busy_table,
    failures,
    goals_table,
    resharding_table,
    training_table,
    transfer_table,
)
from dcp_remote.errors import InvalidArgumentError

FOLDER = Path(__file__).parent
README = FOLDER.parent.parent / "README.md"
BEGIN, END = "<!-- bench: written by `python -m dcp_remote.bench.publish` -->", "<!-- /bench -->"

RESULTS, TABLES, CHART = "results.json", "RESULTS.md", "results.png"

# Sections that compare no clients by save and load.
_TABLES = {BUSY: busy_table, TRAINING: training_table, RESHARDING: resharding_table}

_PICTURE = "Seconds of a save and of a load, by client"


def document(results: Results) -> str:
    """RESULTS.md: every table."""
    parts = [
        "<!-- Written by `python -m dcp_remote.bench.publish`, from results.json. -->",
        "# The benchmark, as measured",
        about(results),
        f"![{_PICTURE}]({CHART})",
        "## What was to be reached",
        goals_table(goals(results)),
    ]
    for section in results.sections():
        table = _TABLES[section](results) if section in _TABLES else transfer_table(results, section)
        parts += [f"## {section[0].upper()}{section[1:]}", table]
    failed = failures(results)
    parts += ["## What failed", failed] if failed else []
    return "\n\n".join(parts) + "\n"


def readme_part(results: Results) -> str:
    """What stands in the README between the two comments, these included."""
    shown = [section for section in results.sections() if section in (HTTP, TLS)]
    parts = [
        BEGIN,
        about(results),
        f"![{_PICTURE}](dcp_remote/bench/{CHART})",
        *(f"**{section}**\n\n{transfer_table(results, section, columns=SHORT_COLUMNS)}" for section in shown),
        goals_table(goals(results)),
        f"All of it, with other servers, defaults and training: [{TABLES}](dcp_remote/bench/{TABLES}).",
        END,
    ]
    return "\n\n".join(parts)


def with_part(readme: str, part: str) -> str:
    """The README with this part in place of the one that it has.

    Raises:
        InvalidArgumentError: It has none.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidArgumentError("The README has no place for the benchmark.", begin=BEGIN, end=END)
    return before + part + after


def write(results: Results, folder: Path) -> None:
    """Measurements, tables and chart into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(results.to_json(), encoding="utf-8")
    (folder / TABLES).write_text(document(results), encoding="utf-8")
    draw(results, folder / CHART)


def main(arguments: Sequence[str] | None = None) -> None:
    """Show what was measured."""
    parser = argparse.ArgumentParser(prog="python -m dcp_remote.bench.publish", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="results.json of a run of the benchmark")
    results = Results.from_json(parser.parse_args(arguments).results.read_text(encoding="utf-8"))
    write(results, FOLDER)
    README.write_text(with_part(README.read_text(encoding="utf-8"), readme_part(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
