"""Provenance: which process saves, for messages, and with which software."""

from __future__ import annotations

import functools
import getpass
import os
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dcp_remote.common.text import escape_unprintable

# Kubernetes puts the namespace of a pod here, beside the token of its service account, which is not read.
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

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
    return {"dcp_remote": _own_version()} | ({"torch": str(torch.__version__)} if torch is not None else {})


@functools.cache
def _own_version() -> str:
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
