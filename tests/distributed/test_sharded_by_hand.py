"""A plain loop whose optimizer keeps 1/N of each state on each rank: by `PerRank`, and refused without."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from dcp_remote import open_run
from tests.support.rank_programs import run_ranks

PROGRAM = Path(__file__).parent / "sharded_by_hand.py"
RANKS = 2


def test_an_optimizer_that_is_sharded_by_hand(tmp_path: Path) -> None:
    """Killed in a save, a job goes on to the bit on as many ranks; without `PerRank` its first save is refused."""
    url = (tmp_path / "run").as_uri()

    def run(job: str, place: str = url, *, is_checked: bool = True) -> list[dict[str, Any]]:
        ranks = run_ranks(PROGRAM, RANKS, place, job, folder=tmp_path, is_checked=is_checked)
        assert is_checked or ranks.exit_codes == [-signal.SIGKILL] * RANKS, ranks.show()
        return ranks.reports

    whole = run("whole", f"{url}-none")
    run("killed", is_checked=False)
    for before, after in zip(whole, run("resumed"), strict=True):
        begun: int = after["begun"]
        assert begun in {2, 4}
        assert after["losses"] == {step: loss for step, loss in before["losses"].items() if int(step) > begun}
    for refused in run("unmarked", f"{url}-unmarked"):
        assert "optim.state.0.weight.momentum: one value on rank 0, another on rank 1" in refused["error"]
        assert "Options: PerRank(optimizer) in the state saves the parts of all ranks" in refused["error"]
    assert open_run(f"{url}-unmarked").latest() is None
