"""Units of bytes, and default sizes."""

from __future__ import annotations

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

# Buffers of a save or restore, beyond the state.
MEMORY_BUDGET_BYTES = 256 * MiB

# Tensors of one exported file of weights, as in Transformers.
WEIGHTS_FILE_BYTES_MAX = 5_000_000_000
