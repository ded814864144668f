"""Units of bytes, and the default memory budget of a save or restore."""

from __future__ import annotations

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

MEMORY_BUDGET_BYTES = 256 * MiB
