"""Partitions of ZeRO-3 in files on NVMe, mapped into memory: a save or a restore needs no memory for them.

DeepSpeed's swapper reads and writes the files past the page cache (`O_DIRECT`), a sub-group at a time, in `step`.
Between steps each file is up to date, but for the last writes of `pipeline_write`, which are waited for here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Key of DeepSpeed's swapper for writes that go on after a step.
_ASYNC_SWAP_OUT = "async_swap_out"


class SwappedPartition:
    """Files of one sub-group: masters, and each state of the optimizer.

    Args:
        optimizer: Optimizer of DeepSpeed.
        number: Number of the sub-group.
    """

    def __init__(self, optimizer: Any, number: int) -> None:
        """Keep the sub-group; maps nothing yet."""
        self._optimizer, self._number = optimizer, number

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of the masters or a state: the mapped file, or the tensor's memory if that has no file.

        The memory of a tensor with a file is not asked: with `pipeline_write` DeepSpeed has given it to other tensors.
        """
        info = self._info
        for swapped in info.tensors:
            if swapped.compute_tensor is tensor:
                return _map(swapped.swap_path, info.numel(), info.dtype())
        return tensor.detach()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Let DeepSpeed read the sub-group into its buffers, and write it back at the end, with new states."""
        self._optimizer._optimizer_states_and_gradient_swap_in(self._number)
        try:
            yield
        finally:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._number)

    def forget_states(self) -> None:
        """Forget the files of the states, as before the first step."""
        info = self._info
        del info.tensors[1:]
        info.has_state_tensors = False

    def flush(self) -> None:
        """Write changes of the mapped files to the device, and drop them from the page cache."""
        for swapped in self._info.tensors:
            _drop_from_cache(swapped.swap_path)

    @property
    def _info(self) -> Any:
        swapper = self._optimizer.optimizer_swapper
        if getattr(swapper, "swap_ops", {}).get(_ASYNC_SWAP_OUT):
            swapper._complete_swap_out(_ASYNC_SWAP_OUT)
        return swapper._get_param_swap_info(self._optimizer.fp32_partitioned_groups_flat[self._number])


def swapped_partition(optimizer: Any, number: int) -> SwappedPartition | None:
    """Return the files of a sub-group of ZeRO-3; None if the sub-group is in memory, as small ones are."""
    return SwappedPartition(optimizer, number) if optimizer._swappable_optimizer_subgroup(number) else None


def map_shard(parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter of ZeRO-3, mapped if the shard is on NVMe."""
    shard: torch.Tensor = parameter.ds_tensor
    if not _is_swapped(parameter):
        return shard.detach()
    swapper = parameter.nvme_swapper
    swapper.synchronize_writes()
    return _map(swapper.get_path(parameter, must_exist=True), parameter.ds_tensor.ds_numel, swapper.dtype)


def flush_shard(parameter: Any) -> None:
    """Write changes of a mapped shard to the device, and drop DeepSpeed's copy; do nothing for a shard in memory."""
    if _is_swapped(parameter):
        _drop_from_cache(parameter.nvme_swapper.get_path(parameter, must_exist=True))
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def _is_swapped(parameter: Any) -> bool:
    return getattr(parameter.ds_tensor, "final_location", None) == "nvme"


def _map(path: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
    _drop_from_cache(path)  # DeepSpeed has written past the cache, which may hold older bytes
    return torch.from_file(path, shared=True, size=elements, dtype=dtype)


def _drop_from_cache(path: str) -> None:
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
