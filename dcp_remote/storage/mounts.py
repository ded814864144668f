"""Which file system a path lies on, as Linux tells it: the ground on which a folder is trusted with a swap or not."""

from __future__ import annotations

import os
import re

# Kernel file systems of one machine, on which flock(2) excludes every process that can see the files. Anything else
# (NFS, SMB, 9p, FUSE, a vendor's parallel file system) may lock within one host only, or not at all, and is refused
# rather than trusted: a name that is missing here costs a clear error, one too many a lost update.
LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2"),
        *("tmpfs", "ramfs"),
        *("overlay", "aufs", "fuse.fuse-overlayfs"),  # containers: locks are the kernel's, above the layers
    }
)

_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system_type(mountinfo: str, path: str) -> str | None:
    """The type of the file system that holds an absolute path.

    Args:
        mountinfo: The text of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
        path: Absolute, without symbolic links; need not exist.

    Returns:
        As the kernel names it (`ext4`, `nfs4`, `fuse.sshfs`); None if no line covers the path.
    """
    longest, found = -1, None
    for line in mountinfo.splitlines():
        fields, separator, rest = line.partition(" - ")
        if not separator:
            continue
        _, _, _, _, escaped, *_ = fields.split(" ")
        mount_point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), escaped)
        covers = path == mount_point or path.startswith(f"{mount_point.rstrip('/')}/")
        # `>=`: of two mounts on one folder the later line covers the earlier.
        if covers and len(mount_point) >= longest:
            longest, found = len(mount_point), rest.split(" ")[0]
    return found


def swap_refusal(root: str) -> str:
    """Why objects below `root` cannot be compared and swapped; empty if they can. Reads one file of the kernel's."""
    try:
        # Octal escapes are of bytes, so names beyond ASCII come through unescaped, in whatever encoding they have.
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            kind = file_system_type(file.read(), os.path.realpath(root))
    except OSError:
        kind = None
    if kind in LOCAL_FILE_SYSTEMS:
        return ""
    where = f"the file system is {kind}" if kind else "this machine does not tell the file system"
    return (
        f"{where}, and only a local one is known to lock files between all processes; "
        "if flock(2) excludes all hosts here, pass storage_options={'allow_network_replace': True}"
    )
