"""The coordinator's cost of many ranks in one process, at a size that takes a second; bytes only, as they are exact."""

from __future__ import annotations

import json

import pytest

from tests.benchmark.clients.scale import Scale, compare, main


def test_a_second_save_sends_no_plans() -> None:
    """And far less than torch's, whose figures for each tensor and rank are as they were at a thousand of each."""
    compared = compare(Scale(ranks=16, tensors=60))
    assert set(compared.torchs.sent_bytes) == {"plans", "final plans", "results", "metadata"}
    assert set(compared.first.sent_bytes) == {"plans", "final plans", "reports", "the end"}
    assert set(compared.second.sent_bytes) == {"keys of plans", "the beginning", "reports", "the end"}
    assert compared.bytes_ratio > 6.5
    # A table takes what a chunk takes, and not what an object of Python's does; an answer a number or two.
    sent, torchs = compared.first.sent_bytes, compared.torchs.sent_bytes
    assert sent["plans"] < torchs["plans"] / 6
    assert sent["final plans"] < torchs["final plans"] / 20
    chunks = 16 * 60
    assert 600 < compared.torchs.total_bytes / chunks < 1000
    # 16 bytes of it are the digest; of so few tensors, names and what is said once count for more than of many.
    assert compared.second.sent_bytes["reports"] / chunks < 60


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on the output, what it does on the other."""
    main(["--ranks", "3", "--tensors", "5"])
    out, err = capsys.readouterr()
    assert json.loads(out)["scale"] == {"ranks": 3, "tensors": 5}
    assert "ranks write" in err
