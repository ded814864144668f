"""Publish what ranks ask the key-value store: the last section of RESULTS.md.

    make scale ARGS="--ranks 512 --json 512.json"
    python -m tests.scale.publish 32.json 128.json 512.json

writes `scale.json` beside the results of the benchmark, and RESULTS.md from both. Runs of `make storm` go to
`storm.json`; the file of which no run is given stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmark.report.publish import FOLDER, RESULTS, SCALE, STORM, TABLES, document
from tests.benchmark.report.rows import Results


def main(arguments: Sequence[str] | None = None) -> None:
    """Publish some runs, by the number of their ranks."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale.publish", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="file of a run of `make scale`")
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in parser.parse_args(arguments).runs]
    for path, kept in ((SCALE, "hosts"), (STORM, "job_ranks")):
        chosen = sorted((run for run in runs if kept in run), key=lambda run: int(run[kept]))
        if chosen:
            path.write_text(json.dumps([_without_kinds(run) for run in chosen], indent=1) + "\n", encoding="utf-8")
    results = Results.from_json((FOLDER / RESULTS).read_text(encoding="utf-8"))
    (FOLDER / TABLES).write_text(document(results), encoding="utf-8")


def _without_kinds(run: dict[str, Any]) -> dict[str, Any]:
    phases = {
        name: {key: figure for key, figure in figures.items() if key != "kinds" and "by_second" not in key}
        for name, figures in run["phases"].items()
    }
    return run | {"phases": phases}


if __name__ == "__main__":
    main()
