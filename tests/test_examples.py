"""The training example under torchrun, shortened, on a folder instead of a bucket. The demo is `make demo`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_fsdp2.py"
TINY = ("--width", "32", "--layers", "2", "--heads", "2", "--steps", "8", "--save-every", "3", "--digest")
# Another number of ranks adds the same numbers in another order, which changes the last digits.
LOSS_TOLERANCE = 1e-4
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Run:
    """How a job ended, and what its ranks noted."""

    exit_status: int
    output: str
    events: list[list[dict[str, Any]]]

    def digests(self, of: str) -> dict[int, set[str]]:
        """By step, the digests that the ranks found."""
        found: dict[int, set[str]] = {}
        for event in (event for events in self.events for event in events if event["event"] == "digest"):
            if event["of"] == of:
                found.setdefault(event["step"], set()).add(event["sha256"])
        return found

    def losses(self) -> dict[int, float]:
        """By step, as rank 0 saw them."""
        return {event["step"]: event["loss"] for event in self.events[0] if event["event"] == "step"}


def train(folder: Path, *arguments: str, ranks: int, checkpoint: str) -> Run:
    """Run the example to its end, in `folder`, without a trace of the user's own cloud."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    example = [str(SCRIPT), "--checkpoint", checkpoint, *TINY, "--events", str(folder / "events"), *arguments]
    with subprocess.Popen(
        [*torchrun, *example],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.terminate()  # torchrun stops its ranks; does nothing if it has ended
    events = [
        [json.loads(line) for line in (folder / "events" / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
        if (folder / "events").exists()
    ]
    return Run(exit_status=process.returncode, output=output, events=events)


def test_training_resumes_bit_for_bit_at_any_world_size(tmp_path: Path) -> None:
    """Two ranks train to the end; their last manifest is removed, as if they had been killed in that save.

    Then two ranks and one go on from the checkpoint before it, in turn: the digest of what they restored is that of
    what was saved, and their losses are those of the first run, exactly at the same size and nearly at the other.
    """
    checkpoint = (tmp_path / "run").as_uri()
    first = train(tmp_path / "first", ranks=2, checkpoint=checkpoint)
    assert first.exit_status == 0, first.output
    manifests = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.glob("run/*/manifest.json"))
    assert manifests == [f"run/step-{step:06d}/manifest.json" for step in (3, 6, 8)]
    (tmp_path / manifests[-1]).unlink()

    for ranks in (2, 1):
        resumed = train(tmp_path / f"resumed-{ranks}", "--save-every", "0", ranks=ranks, checkpoint=checkpoint)
        assert resumed.exit_status == 0, resumed.output
        assert resumed.digests("loaded") == {6: first.digests("saving")[6]}
        assert len(resumed.digests("loaded")[6]) == 1
        assert sorted(resumed.losses()) == [7, 8]
        tolerance = 0.0 if ranks == 2 else LOSS_TOLERANCE
        for step, loss in resumed.losses().items():
            assert loss == pytest.approx(first.losses()[step], rel=0, abs=tolerance)


def test_a_failed_background_save_stops_every_rank(tmp_path: Path) -> None:
    """A file lies where the first checkpoint's folder should be: the save fails in its thread, on both ranks.

    The next save raises it, before it begins, on both ranks; at least the first to end says why (torchrun may stop the
    other before it does), and neither waits for the other.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000003").write_text("in the way")
    run = train(tmp_path / "job", ranks=2, checkpoint=(tmp_path / "run").as_uri())
    assert run.exit_status != 0
    assert re.search(r"^Rank [01] stops\. \(rank [01]\) \w+Error: .*step-000003", run.output, re.MULTILINE), run.output
    assert len(run.events) == 2
    for events in run.events:
        happened = [
            (event["event"], event["step"]) for event in events if event["event"] in {"saving", "saved", "failed"}
        ]
        assert happened == [("saving", 3), ("failed", 3)]
        assert max(event["step"] for event in events if event["event"] == "step") == 6
    assert not list(tmp_path.glob("run/*/manifest.json"))


def test_a_wrong_url_is_told_before_training(tmp_path: Path) -> None:
    """A scheme that nobody knows: the job ends with the error that rank 0 met, and no step is made."""
    run = train(tmp_path / "job", ranks=2, checkpoint="s4://bucket/run")
    assert run.exit_status != 0
    assert re.search(r"^Rank [01] stops\. InvalidArgumentError: ", run.output, re.MULTILINE), run.output
    assert [[event["event"] for event in events] for events in run.events] == [["started"], ["started"]]
