"""Descriptions of the process that saves."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

import pytest

from dcp_remote.common import provenance
from dcp_remote.common.provenance import describe_process

SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "POD_NAME", "POD_NAMESPACE", "HOSTNAME", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SCHEDULERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(provenance, "_NAMESPACE_FILE", tmp_path / "namespace")


def test_a_process_of_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, pid, user, versions and time; "none" is torchrun's word for no id."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    host, pid, user, own, *_, since = describe_process().split(", ")
    assert (host, pid, user) == (socket.gethostname(), f"pid {os.getpid()}", f"user {getpass.getuser()}")
    assert own.startswith("dcp_remote ")
    assert since.startswith("since 20")


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"SLURM_JOB_ID": "4242"}, "Slurm job 4242"),
        ({"TORCHELASTIC_RUN_ID": "tuesday"}, "torchrun tuesday"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0"}, "pod train-0"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAME": "train-0", "POD_NAMESPACE": "ml"}, "pod ml/train-0"),
        ({"HOSTNAME": "train-0", "POD_NAMESPACE": "ml"}, ""),
    ],
)
def test_the_job_by_its_scheduler(environment: dict[str, str], job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parts = describe_process().split(", ")
    assert [part for part in parts if part.startswith(("Slurm", "torchrun", "pod"))] == ([job] if job else [])


def test_the_namespace_of_a_pod_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOSTNAME", "train-0")
    (tmp_path / "namespace").write_text("ml\n")
    assert ", pod ml/train-0, " in describe_process()


def test_hostile_and_long_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters and what is no Unicode are escaped, and all parts fit into a catalog."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 5000)
    for name in SCHEDULERS:
        monkeypatch.setenv(name, "\x1b[2J\n\udcff" + "x" * 5000)
    text = describe_process()
    assert text.isprintable()
    assert r"Slurm job \x1b[2J\n\udcffx" in text
    assert len(text) < 1000


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number, as in a container that runs as any user."""

    def fail() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert f", user {os.getuid()}, " in describe_process()
