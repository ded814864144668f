"""Jobs of a program with a framework: trainings that a process does one after the other.

Importing a framework takes longer than a small training, so that a process does several.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.rank_programs import Ranks

Jobs = Callable[..., Ranks]


def jobs_of(program: str, run_program: Callable[..., Ranks], folder: Path) -> Jobs:
    """Return a function that runs jobs of a program: `train(2, mode="fsdp2", first={…}, second={…})`.

    The program calls `run_jobs` of `hf_models.py`; options of the jobs lie in the folder.
    """

    def train(world_size: int = 1, *, mode: str = "plain", is_checked: bool = True, **jobs: dict[str, Any]) -> Ranks:
        path = folder / f"options-{len(list(folder.glob('options-*')))}.json"
        path.write_text(json.dumps({"mode": mode, "jobs": jobs}))
        return run_program(program, world_size, path, is_checked=is_checked)

    return train


def killed_job(url: str, **options: Any) -> dict[str, Any]:
    """Return the options of a job that is killed in the middle of its second save, which a slow link makes long."""
    return {"url": url, "settings": {"storage_options": {"upload_bytes_per_second": 100_000}}, **options}
