"""Publish measurements: tables in Markdown, a chart, and the figures of the README.

    python -m tests.benchmark.report.publish bench-output/results.json

writes `results.json`, `RESULTS.md` and `results.png` beside this file, and the part of README.md between two comments.
None of these is written by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dcp_remote.common.text import human_bytes
from dcp_remote.errors import InvalidArgumentError
from tests.benchmark.report.chart import draw
from tests.benchmark.report.goals import goals, wall_of_better_peer
from tests.benchmark.report.plan import BUSY, HTTP, MANY, OURS, PEERS, RESHARDING, TINY, TLS, TRAINING
from tests.benchmark.report.rows import Results, median
from tests.benchmark.report.tables import (
    about,
    busy_table,
    failures,
    goals_table,
    many_table,
    resharding_table,
    scale_table,
    storm_table,
    tiny_table,
    training_table,
    transfer_table,
)

FOLDER = Path(__file__).parent
README = FOLDER.parent.parent.parent / "README.md"
BEGIN, END = "<!-- bench: written by `python -m tests.benchmark.report.publish` -->", "<!-- /bench -->"

RESULTS, TABLES, CHART = "results.json", "RESULTS.md", "results.png"

# Runs of many ranks, and of their requests at a store that refuses some, by `tests.scale.publish`.
SCALE, STORM = FOLDER / "scale.json", FOLDER / "storm.json"

# Sections that compare no clients by save and load.
_TABLES = {BUSY: busy_table, TRAINING: training_table, RESHARDING: resharding_table, MANY: many_table, TINY: tiny_table}

_PICTURE = "Seconds of a save and of a load, by client"
_ACTIONS = ("save", "load")


def document(results: Results) -> str:
    """Return RESULTS.md: every table, and that of the published runs of many ranks."""
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
    parts += ["## Many ranks", scale_table(json.loads(SCALE.read_text(encoding="utf-8")))]
    parts += [storm_table(json.loads(STORM.read_text(encoding="utf-8")))]
    return "\n\n".join(parts) + "\n"


def readme_part(results: Results) -> str:
    """Return the part of the README between the two comments, these included: three figures and their conditions."""
    seconds = {action: _median(results, TLS, OURS, action, "wall_seconds") for action in _ACTIONS}
    of_peer = {action: _measured(wall_of_better_peer(results, TLS, action, 1)) for action in _ACTIONS}
    above, *peers_above = (
        human_bytes(int(max(_median(results, TLS, client, action, "above_state_bytes") for action in _ACTIONS)))
        for client in (OURS, *PEERS)
    )
    waits = _median(results, HTTP, OURS, "background", "blocked_seconds")
    peer_waits = _measured(wall_of_better_peer(results, HTTP, "save", 1))
    state = human_bytes(int(_median(results, TLS, OURS, "save", "state_bytes")))
    told = results.about
    conditions = (
        f"One rank, {state} of parameters and Adam moments, a server on the same {told['cores']} cores; the peers are "
        "FsspecWriter with s3fs, and s3torchconnector, each at its best settings\n"
        f"({told['versions']}; {told['date']}):"
    )
    seconds_line = (
        f"- **Seconds**, over TLS: a save takes {seconds['save']:.2f} s, a load {seconds['load']:.2f} s; the better "
        f"peer {of_peer['save']:.2f} s and {of_peer['load']:.2f} s."
    )
    memory_line = f"- **Memory** above the state, over TLS: at most {above}; the peers {' and '.join(peers_above)}."
    waits_line = (
        f"- **Training waits** {waits:.2f} s for a save in the background, over http; a save of the better peer that "
        f"is not in the background takes {peer_waits:.2f} s."
    )
    return f"{BEGIN}\n{conditions}\n\n{seconds_line}\n{memory_line}\n{waits_line}\n{END}"


def _median(results: Results, section: str, client: str, action: str, field: str) -> float:
    """Return the median of a figure on one rank, by the name of its field."""
    return _measured(median(results.select(section, client, action), lambda row: float(getattr(row, field))))


def _measured(figure: float | None) -> float:
    if figure is None:
        raise InvalidArgumentError("A figure of the README was not measured.", sections=f"{HTTP}, {TLS}")
    return figure


def with_part(readme: str, part: str) -> str:
    """Return the README with this part in place of the old one."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidArgumentError("The README has no place for the benchmark.", begin=BEGIN, end=END)
    return before + part + after


def files(results: Results) -> dict[str, bytes]:
    """Return measurements, tables and chart, by file name."""
    with TemporaryDirectory() as folder:
        chart = Path(folder) / CHART
        draw(results, chart)
        return {RESULTS: results.to_json().encode(), TABLES: document(results).encode(), CHART: chart.read_bytes()}


def write(results: Results, folder: Path) -> None:
    """Write measurements, tables and chart into a folder; none if one of them cannot be made."""
    made = files(results)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        (folder / name).write_bytes(content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Publish the results; on an error, write nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.report.publish", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("results", type=Path, help="results.json of a run of the benchmark")
    results = Results.from_json(parser.parse_args(arguments).results.read_text(encoding="utf-8"))
    made = {FOLDER / name: content for name, content in files(results).items()}
    readme = with_part(README.read_text(encoding="utf-8"), readme_part(results))
    for path, content in (made | {README: readme.encode()}).items():
        path.write_bytes(content)


if __name__ == "__main__":
    main()
