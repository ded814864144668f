"""Tests of the checks of a job's ranks: one that does not come, or is not reached, is named."""

from __future__ import annotations

import gc
import re
import socket
from collections.abc import Iterator

import pytest

from dcp_remote.errors import StorageError
from dcp_remote.manager import rank_checks
from dcp_remote.manager.rank_checks import check_sockets, exchange_reports
from tests.support.ports import reserved_port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Reserve a port, and make this process rank 0 of 2, whose key-value store is there."""
    with reserved_port() as reserved:
        port = int(reserved.getsockname()[1])
        variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 8, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield port


@pytest.mark.usefixtures("port")
def test_a_rank_that_never_comes() -> None:
    """Begin as one of two ranks: the other is named, in time, and the node of torchrun that starts it."""
    with pytest.raises(
        StorageError, match=r"^Rank 1 has not called `dcp-remote doctor` within \d+ s of rank 0"
    ) as caught:
        exchange_reports({"checks": []}, arrival_seconds=1)
    assert "it was given up. Look at the output of these ranks" in caught.value.what
    assert "rank N is on node N // 8 of torchrun" in caught.value.what


def test_a_rank_0_that_never_comes(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Begin as rank 1, where rank 0 hosts the store: the store is named, without a stack of torch's."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StorageError, match=rf"key-value store of the job, 127\.0\.0\.1 port {port}, .* MASTER_ADDR"):
        exchange_reports({"checks": []}, arrival_seconds=1)
    assert capfd.readouterr().err == ""


def test_a_store_that_does_not_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(StorageError, match=rf"key-value store of the job, 127\.0\.0\.1 port {port}, .* MASTER_ADDR"):
        exchange_reports({"checks": []}, arrival_seconds=1)


def test_a_rank_that_is_not_reached() -> None:
    """Connect to three ranks, one of which listens nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = server.getsockname()
        state, fact, cure = check_sockets(1, [here, here, ("127.0.0.1", 1)])
        assert (state, fact) == ("warn", "no connection to rank 2 (address 127.0.0.1: Connection refused)")
        assert "rank_sockets=RankSockets(" in cure
        assert check_sockets(0, [here] * 200)[:2] == ("ok", "connected to 50 other ranks")


@pytest.mark.usefixtures("port")
def test_ranks_that_wait_long_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one round of all ranks, here one, take longer than the limit: the report has figure, limit and cure."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    (report,) = exchange_reports({"checks": []}, arrival_seconds=1)
    assert [check["name"] for check in report["checks"]] == ["rank sockets"]
    gc.collect()  # the store of the first call, whose port the second one takes
    monkeypatch.setattr(rank_checks, "_ROUND_SECONDS_MAX", -1.0)
    (report,) = exchange_reports({"checks": []}, arrival_seconds=1)
    check = report["checks"][-1]
    assert (check["name"], check["state"]) == ("key-value store", "warn")
    assert re.fullmatch(r"one wait of 1 rank for each other took \d+\.\d s, limit -1 s", check["fact"])
    assert "arrival_seconds" in check["cure"]
