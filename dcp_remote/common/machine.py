"""Checks of this machine: what a training needs of it to save and to restore. Sends no request."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dcp_remote.common.findings import Check, Finding
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.common.units import GiB

# Each tensor from a worker of a DataLoader is an open file.
_OPEN_FILES_MIN = 4096

_TEMPORARY_BYTES_MIN = GiB

# Files with the limit of memory of this process's control group, of version 2 and 1.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# Packages that a report names beside torch and this one.
_PACKAGES = ("numpy", "obstore", "boto3", "botocore", "s3fs")


def machine_checks() -> Sequence[Check]:
    """Return the checks of this machine. torch is not imported: its version is that of its installation."""
    return (
        Check("open files", _check_open_files),
        Check("cpu and memory", _check_memory),
        Check("temporary files", _check_temporary_folder),
        Check("torch", _check_torch),
        Check("packages", _check_packages),
    )


def count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_space(path: str | Path, least_bytes: int, cure: str) -> Finding:
    """Warn if the file system of a path has less free space than `least_bytes`."""
    space = shutil.disk_usage(path)
    fact = f"{human_bytes(space.free)} of {human_bytes(space.total)} are free at {path}"
    return Finding("ok", fact) if space.free >= least_bytes else Finding("warn", fact, cure)


def _check_open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES_MIN:
        return Finding("ok", "no limit" if limit == resource.RLIM_INFINITY else f"the limit is {limit}")
    return Finding("warn", f"the limit is {limit}", "Raise it before the training starts: `ulimit -n 65536`.")


def _check_memory() -> Finding:
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = ""
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or its text is "max"
            limit_bytes = int(Path(path).read_text(encoding="ascii"))
            if limit_bytes < size_bytes:
                limit = f", limited to {human_bytes(limit_bytes)} by the control group"
                break
    return Finding("ok", f"{format_count(count_cores(), 'core')}, {human_bytes(size_bytes)}{limit}")


def _check_temporary_folder() -> Finding:
    cure = "Free space there, or set TMPDIR to another folder: imports, exports and the DataLoader need it."
    return check_space(tempfile.gettempdir(), _TEMPORARY_BYTES_MIN, cure)


def _check_torch() -> Finding:
    found = _find_version("torch")
    if found is None:
        return Finding("warn", "not installed", "Install torch 2.9 or newer in the environment of the training.")
    return Finding("ok", found)


def _check_packages() -> Finding:
    listed = [f"{name} {found}" for name in ("dcp-remote", *_PACKAGES) if (found := _find_version(name)) is not None]
    return Finding("ok", ", ".join([*listed, f"Python {platform.python_version()} on {platform.system()}"]))


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
