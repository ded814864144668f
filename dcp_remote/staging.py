"""Copies of a state, made before training goes on, in memory that is used again by the next."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Stager:
    """torch's own stager, which keeps its buffers for as long as the tensors that it copied live.

    Pinned, and copied without waiting for each, where there is a GPU (torch/distributed/checkpoint/staging.py).
    It copies whole storages: a small view of a large tensor takes the memory of the large one.
    """

    def __init__(self) -> None:
        """See the class; nothing is allocated yet."""
        self._stager: DefaultStager | None = None

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU, objects included. Valid until the next call; returns when it is made."""
        if self._stager is None:
            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=cuda,
                )
            )
        # Not a future: staging is not asynchronous.
        return cast("dict[str, Any]", self._stager.stage(state))

    def close(self) -> None:
        """Let go of the buffers."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
