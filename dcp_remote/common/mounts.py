"""File system types of paths on Linux, which decide whether a folder is trusted with compare-and-swap."""

from __future__ import annotations

import os
import re
from pathlib import Path

# File systems of one machine, on which flock(2) excludes every process that can see the files. All others (NFS, SMB,
# 9p, FUSE, parallel file systems) may lock within one host only, or not at all, and are refused: a name that is missing
# here costs a clear error, a wrong name a lost update.
LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2"),
        *("tmpfs", "ramfs"),
        *("overlay", "aufs", "fuse.fuse-overlayfs"),  # of containers; the kernel locks above their layers
    }
)

_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system_type(mountinfo: str, path: str) -> str | None:
    """Return the type of the file system that holds a path, such as `ext4` or `nfs4`; None if no line covers the path.

    `mountinfo` is the text of `/proc/self/mountinfo`; the path is absolute, without symbolic links, and need not exist.
    """
    longest, found = -1, None
    for line in mountinfo.splitlines():
        fields, separator, rest = line.partition(" - ")
        if not separator:
            continue
        _, _, _, _, escaped, *_ = fields.split(" ")
        mount_point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), escaped)
        covers = path == mount_point or path.startswith(f"{mount_point.rstrip('/')}/")
        # `>=`, since of two mounts on one folder the later line hides the earlier.
        if covers and len(mount_point) >= longest:
            longest, found = len(mount_point), rest.split(" ")[0]
    return found


def swap_refusal(root: str) -> str:
    """Return why objects below `root` cannot be compared and swapped; empty if they can. Reads one file of /proc."""
    try:
        # Names beyond ASCII are not escaped there, and may have any encoding.
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="surrogateescape") as file:
            kind = file_system_type(file.read(), os.path.realpath(root))
    except OSError:
        kind = None
    if kind in LOCAL_FILE_SYSTEMS:
        return ""
    where = f"the file system is {kind}" if kind else "the type of the file system is unknown"
    return (
        f"{where}, and only local ones are known to lock files between all processes; "
        "if flock(2) excludes all hosts here, pass storage_options['allow_network_replace'] = True"
    )
