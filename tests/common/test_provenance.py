"""Descriptions of the process that saves, and of its software."""

from __future__ import annotations

import functools
import getpass
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcp_remote.common import provenance
from dcp_remote.common.provenance import describe_process, describe_software

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


# ---- software


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return `git` in a new repository with one commit, which is the working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # of a hook that runs the tests
        monkeypatch.delenv(name)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    Path("train.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "a")
    git("tag", "v1")
    monkeypatch.setattr(provenance, "_find_commit", functools.cache(provenance._find_commit.__wrapped__))
    return git


def test_the_commit_and_whether_files_differ(repository: Callable[..., str]) -> None:
    """The commit itself, also where a tag names it; a file that git does not track is no difference."""
    commit = repository("rev-parse", "HEAD")
    assert describe_software()["git"] == commit
    Path("train.py").write_text("2")
    Path("log.txt").write_text("x")
    assert describe_software()["git"] == commit  # asked once per process
    provenance._find_commit.cache_clear()
    assert describe_software()["git"] == f"{commit}-dirty"
    repository("checkout", "-q", "train.py")
    os.utime("train.py", (0, 0))  # which git notes in its index, where it may
    index = Path(".git/index").read_bytes()
    provenance._find_commit.cache_clear()
    assert describe_software()["git"] == commit
    assert Path(".git/index").read_bytes() == index


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_find_commit", provenance._find_commit.__wrapped__)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert "git" not in describe_software()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git" not in describe_software()
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.1)
    assert "git" not in describe_software()


@pytest.mark.usefixtures("repository")
def test_versions_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks that are imported, and nothing but dcp_remote and torch with the switch."""
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(__version__="2.6\x1b"))
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace())
    described = describe_software()
    assert described["lightning"] == r"2.6\x1b"
    assert "torchtitan" not in described
    assert {"dcp_remote", "python", "git"} <= described.keys()
    monkeypatch.setenv("DCP_REMOTE_PROVENANCE", "0")
    assert set(describe_software()) - {"torch"} == {"dcp_remote"}
