"""Run trainings of Axolotl, one after the other, in one process: importing it takes longer than a small training.

Argument: the path of a JSON file of jobs by name, each the path of a YAML in a folder of its own. Reports by job what
`axolotl_watch` reports, warnings of dcp_remote, and the text of an error.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from pathlib import Path

from tests.support.rank_programs import report

# Time after which the stacks of all threads are written to the output of a training that stands still, in seconds.
STANDSTILL_SECONDS = 150


class Warnings(logging.Handler):
    """Handler that keeps the texts of warnings."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(record.getMessage())


def main() -> None:
    """Run each job."""
    # Processes that prepare data import this file, and need none of these.
    from axolotl.cli.train import do_cli
    from axolotl.integrations.base import PluginManager

    import axolotl_watch
    from dcp_remote.integrations.runs import close_managers

    jobs: dict[str, str] = json.loads(Path(sys.argv[1]).read_text())
    del sys.argv[1:]  # Axolotl reads them as well
    found = {}
    for name, path in jobs.items():
        faulthandler.dump_traceback_later(STANDSTILL_SECONDS, repeat=True)
        os.chdir(Path(path).parent)
        PluginManager.get_instance().plugins.clear()
        axolotl_watch.OPTIONS["job"] = name
        warned, error = Warnings(), None
        logging.getLogger("dcp_remote").addHandler(warned)
        try:
            do_cli(path)
            close_managers()
        except Exception as raised:  # noqa: BLE001  # Axolotl's own are of many kinds
            error = f"{type(raised).__name__}: {raised}"
        logging.getLogger("dcp_remote").removeHandler(warned)
        found[name] = {"warnings": warned.texts, "error": error}
        report(ended=found)


if __name__ == "__main__":
    main()
