"""Requests of many ranks that begin at once, counted by a server that answers 503 above a rate; real stores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")

RANKS, REQUESTS = 24, 8


def test_a_storm_at_a_server(tmp_path: Path) -> None:
    """Put and read as 24 of 4,000 ranks: no request is lost, few are refused, and nothing else is sent.

    Of ranks that begin as if each were alone, four to six for each are refused; of these 1.0 to 1.4.
    """
    size = ["--ranks", str(RANKS), "--job-ranks", "4000", "--processes", "2", "--requests", str(REQUESTS), "--gently"]
    command = [sys.executable, "-m", "tests.scale.storm", "--json", str(tmp_path / "figures.json"), *size]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    phases = json.loads((tmp_path / "figures.json").read_text())["phases"]
    for method in ("PUT", "GET"):
        figures = phases[f"{method}, gentle"]
        assert figures["answered"] == RANKS * REQUESTS
        assert figures["refused"] < 3 * figures["answered"]
        assert figures["other_requests"] == 0
