"""Publish measurements: tables in Markdown, a chart, and the part of the README between two comments.

    python -m tests.benchmark.report.publish bench-output/results.json

writes `results.json`, `RESULTS.md` and `results.png` beside this file, and the part of README.md. None of these is
written by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dcp_remote.errors import InvalidArgumentError
from tests.benchmark.report.chart import draw
from tests.benchmark.report.goals import goals
from tests.benchmark.report.plan import BUSY, HTTP, RESHARDING, TLS, TRAINING
from tests.benchmark.report.rows import Results
from tests.benchmark.report.tables import (
    SHORT_COLUMNS,
    about,
    busy_table,
    failures,
    goals_table,
    resharding_table,
    training_table,
    transfer_table,
)

FOLDER = Path(__file__).parent
README = FOLDER.parent.parent.parent / "README.md"
BEGIN, END = "<!-- bench: written by `python -m tests.benchmark.report.publish` -->", "<!-- /bench -->"

RESULTS, TABLES, CHART = "results.json", "RESULTS.md", "results.png"

# Sections that compare no clients by save and load.
_TABLES = {BUSY: busy_table, TRAINING: training_table, RESHARDING: resharding_table}

# Errors of reading JSON that is broken or not ours: other names, types or figures.
_FOREIGN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

_PICTURE = "Seconds of a save and of a load, by client"


def document(results: Results) -> str:
    """Return RESULTS.md: every table."""
    parts = [
        "<!-- Written by `python -m tests.benchmark.report.publish`, from results.json. -->",
        "# The benchmark, as measured",
        about(results),
        f"![{_PICTURE}]({CHART})",
        "## Goals",
        goals_table(goals(results)),
    ]
    for section in results.sections():
        table = _TABLES[section](results) if section in _TABLES else transfer_table(results, section)
        parts += [f"## {section[0].upper()}{section[1:]}", table]
    failed = failures(results)
    parts += ["## Failures", failed] if failed else []
    return "\n\n".join(parts) + "\n"


def readme_part(results: Results) -> str:
    """Return the part of the README between the two comments, these included."""
    shown = [section for section in results.sections() if section in (HTTP, TLS)]
    parts = [
        BEGIN,
        about(results),
        f"![{_PICTURE}](tests/benchmark/report/{CHART})",
        *(f"**{section}**\n\n{transfer_table(results, section, columns=SHORT_COLUMNS)}" for section in shown),
        goals_table(goals(results)),
        f"All tables, with other servers, defaults and training: [{TABLES}](tests/benchmark/report/{TABLES}).",
        END,
    ]
    return "\n\n".join(parts)


def with_part(readme: str, part: str) -> str:
    """Return the README with this part in place of the old one.

    Raises:
        InvalidArgumentError: The README has no such part.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidArgumentError("The README has no place for the benchmark.", begin=BEGIN, end=END)
    return before + part + after


def files(results: Results) -> dict[str, bytes]:
    """Return measurements, tables and chart, by file name.

    Raises:
        InvalidArgumentError: There are no measurements, or they are not of this benchmark.
        ImportError: matplotlib is not installed.
    """
    if not results.rows:
        raise InvalidArgumentError("There is no measurement in it.")
    try:
        with TemporaryDirectory() as folder:
            chart = Path(folder) / CHART
            draw(results, chart)
            return {RESULTS: results.to_json().encode(), TABLES: document(results).encode(), CHART: chart.read_bytes()}
    except _FOREIGN as error:
        raise InvalidArgumentError("These are no measurements of this benchmark.", cause=error) from error


def write(results: Results, folder: Path) -> None:
    """Write measurements, tables and chart into a folder; none if one of them cannot be made.

    Raises:
        InvalidArgumentError: There are no measurements, or they are not of this benchmark.
        ImportError: matplotlib is not installed.
    """
    made = files(results)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        (folder / name).write_bytes(content)


def read(path: Path) -> Results:
    """Return the results that a run has written.

    Raises:
        InvalidArgumentError: The file holds something else.
        OSError: The file cannot be read.
    """
    try:
        return Results.from_json(path.read_text(encoding="utf-8"))
    except _FOREIGN as error:
        raise InvalidArgumentError("This is no results.json of the benchmark.", path=path, cause=error) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Publish the results; on an error, print one line, exit with code 1 and write nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.report.publish", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("results", type=Path, help="results.json of a run of the benchmark")
    try:
        results = read(parser.parse_args(arguments).results)
        made = {FOLDER / name: content for name, content in files(results).items()}
        readme = with_part(README.read_text(encoding="utf-8"), readme_part(results))
        for path, content in (made | {README: readme.encode()}).items():
            path.write_bytes(content)
    except (InvalidArgumentError, ImportError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
