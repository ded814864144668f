"""Open files of the process that hosts the key-value store: one that may open too few is named before ranks connect."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dcp_remote.common import descriptors
from dcp_remote.common.descriptors import find_store_shortage
from dcp_remote.coordination import group
from dcp_remote.manager.rank_checks import exchange_reports
from tests.support.ports import reserved_port
from tests.support.rank_pool import RankPool


@contextmanager
def limit(count: int) -> Iterator[None]:
    """Let this process open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def rank_0_hosts_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_too_few_files_are_named_with_their_cure() -> None:
    """Host a store of 200 ranks, then of 300, which need up to 1,264 connections, where 1,024 files may be open."""
    with limit(1024):
        assert find_store_shortage("localhost", 200) is None
        shortage = find_store_shortage("localhost", 300)
    assert shortage is not None
    for part in ("may open 1024 files", "1264", "300 ranks", "before rank 0 starts", "`ulimit -n 1264`", "LimitNOFILE"):
        assert part in shortage


def test_a_store_on_another_machine_is_not_judged() -> None:
    with limit(1024):
        assert find_store_shortage("192.0.2.1", 300) is None


def test_the_limit_is_that_of_torchrun_where_it_hosts_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in a child whose own limit is lower, then in one whose parent's is: the parent's counts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    code = (
        "import resource; from dcp_remote.common.descriptors import find_store_shortage;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, ({}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]));"
        "print(find_store_shortage('localhost', 300))"
    )

    def ask(own: int) -> str:
        return subprocess.check_output([sys.executable, "-c", code.format(own)], text=True)

    with limit(2048):
        assert ask(1024) == "None\n"
    with limit(1024):
        assert "before torchrun starts" in ask(2048)


def test_doctor_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as rank 0 of 300, where no other rank comes: the report that would be sent has the warning."""
    report: dict[str, list[dict[str, str]]] = {"checks": []}
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 300, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with limit(1024), pytest.raises(Exception, match="not called"):
            exchange_reports(report, arrival_seconds=1)
    (check,) = report["checks"]
    assert (check["name"], check["state"]) == ("store connections", "warn")
    assert check["cure"].startswith("Raise its limit")


def warned() -> list[str]:
    """Make the ranks of a job twice, as two managers do; return what was logged."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    group.logger.addHandler(handler)
    with limit(1024), pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "_STORE_CONNECTIONS", 1000)
        for name in "ab":
            group.RankGroup.from_process_group(None, name)
    group.logger.removeHandler(handler)
    group._warn_of_shortage.cache_clear()
    return lines


def test_a_job_is_warned_once(rank_pool: RankPool) -> None:
    """Begin a job whose ranks need more connections than its rank 0 may have open: a line, on rank 0 alone."""
    first, *others = rank_pool.run(warned)
    assert len(first) == 1
    assert "ulimit -n" in first[0]
    assert others == [[], [], []]
