"""Memory of the host that this process may still use."""

from __future__ import annotations

from pathlib import Path

from dcp_remote.common.units import KiB

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Return the bytes that the host and the control groups of this process have free; None if that is unknown.

    As `MemAvailable` of Linux, and memory.max less memory.current of each group, caches of files counted as free
    (https://docs.kernel.org/admin-guide/cgroup-v2.html). Groups of version 1 are not looked at.
    """
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = [int(lines["MemAvailable"].split()[0]) * KiB]
        # A line of version 2: "0::/path of the group".
        paths = [line[3:] for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::")]
    except (OSError, KeyError, ValueError):
        return None
    for path in paths:
        group = _CGROUPS / path.strip("/")
        free += [left for each in (group, *group.parents) if (left := _left_bytes(each)) is not None]
    return max(min(free), 0)


def _left_bytes(group: Path) -> int | None:
    try:
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int((group / "memory.max").read_text()) - used + int(cached["inactive_file"])
    except (OSError, KeyError, ValueError):  # no such group, or no limit ("max")
        return None
