"""Provenance: which process saves, for messages, and with which software, for the manifest.

The command line is left out: no rule finds every secret in one.
"""

from __future__ import annotations

import functools
import getpass
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dcp_remote.common.text import escape_unprintable

# Kubernetes puts the namespace of a pod here, beside the token of its service account, which is not read.
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# Value "0" leaves all but the versions of dcp_remote and torch out of manifests.
_VARIABLE = "DCP_REMOTE_PROVENANCE"

# Frameworks that the integrations are for, by the names of their modules.
_FRAMEWORKS = ("accelerate", "axolotl", "deepspeed", "lightning", "llamafactory", "torchtitan", "transformers")

# Commit and changes of tracked files. Unlike describe, status writes no index where locks are optional.
_GIT = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
_GIT += ["--ignore-submodules=dirty", "--no-ahead-behind"]
_COMMIT_LINE = "# branch.oid "

# Time after which a repository that is very large, or on a slow disk, is left out: the first save waits for it.
_GIT_SECONDS = 1.0

# Characters of each part of a description, so that all parts together fit into a catalog's text of 1,000.
_PART_CHARACTERS_MAX = 90


def describe_process() -> str:
    """Return host, pid, user, job, versions and the present time, as one line without secrets.

    A run's catalog keeps this line of the job that may commit.
    """
    parts = [socket.gethostname(), f"pid {os.getpid()}", f"user {_find_user()}", *_find_jobs()]
    parts += [f"{name} {number}" for name, number in software_versions().items()]
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return ", ".join(escape_unprintable(part)[:_PART_CHARACTERS_MAX] for part in [*parts, f"since {since}"])


def software_versions() -> dict[str, str]:
    """Return the versions of dcp_remote, and of torch if it is imported, by name."""
    torch = sys.modules.get("torch")
    return {"dcp_remote": own_version()} | ({"torch": str(torch.__version__)} if torch is not None else {})


def describe_software(*, meshes: Sequence[str] = ()) -> dict[str, str]:
    """Return what a manifest names as its writer: versions, by name, as `git` a commit, and as `mesh` the meshes.

    The commit is that of the working directory, with `-dirty` where tracked files differ. It is left out where the
    folder is in no repository, git is not installed, or git takes more than a second. Runs git once per process.
    `meshes` are descriptions of the saved state's device meshes.
    """
    described = software_versions()
    if os.environ.get(_VARIABLE) != "0":
        described["python"] = platform.python_version()
        frameworks = {name: getattr(sys.modules.get(name), "__version__", None) for name in _FRAMEWORKS}
        described |= {name: number for name, number in frameworks.items() if isinstance(number, str)}
        described |= {"git": commit} if (commit := _find_commit()) else {}
        described |= {"mesh": "; ".join(meshes)} if meshes else {}
    return {name: escape_unprintable(text)[:_PART_CHARACTERS_MAX] for name, text in described.items()}


@functools.cache
def _find_commit() -> str:
    found: list[str] = []
    # In a thread: on a file system that hangs, a process outlives its kill, and `subprocess.run` waits for its end.
    thread = threading.Thread(target=lambda: found.append(_ask_git()), name="dcp_remote-git", daemon=True)
    with suppress(RuntimeError):  # the process ends, and starts no thread any more
        thread.start()
        thread.join(_GIT_SECONDS)
    return found[0] if found else ""


def _ask_git() -> str:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(  # noqa: S603  # a fixed command
            _GIT, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = answer.stdout.decode(errors="replace").splitlines()
    commit = next((line.removeprefix(_COMMIT_LINE) for line in lines if line.startswith(_COMMIT_LINE)), "")
    is_dirty = any(not line.startswith("#") for line in lines)
    return "" if commit in ("", "(initial)") else f"{commit}-dirty" if is_dirty else commit


@functools.cache
def own_version() -> str:
    """Return the version of this package, "unknown" where it is not installed."""
    try:
        return version("dcp-remote")
    except PackageNotFoundError:  # the package was copied, not installed
        return "unknown"


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user often has no name; Windows has no numbers
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


def _find_jobs() -> list[str]:
    """Return the ids of the job by the schedulers that run it, as far as the environment knows them."""
    jobs = []
    if job := os.environ.get("SLURM_JOB_ID"):
        jobs.append(f"Slurm job {job}")
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        namespace = os.environ.get("POD_NAMESPACE", "")
        with suppress(OSError, UnicodeDecodeError):
            namespace = namespace or _NAMESPACE_FILE.read_text().strip()
        pod = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or socket.gethostname()
        jobs.append(f"pod {namespace}/{pod}" if namespace else f"pod {pod}")
    # torchrun's own default is the word "none".
    if (job := os.environ.get("TORCHELASTIC_RUN_ID")) and job != "none":
        jobs.append(f"torchrun {job}")
    return jobs
