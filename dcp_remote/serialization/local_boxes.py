"""Tensors that a framework shards itself: boxes of one tensor, each in the memory of the rank that holds it."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn, Self, SupportsIndex, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_remote.common.geometry import Box, boxes_of_run
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.serialization.tensors import dtype_name, empty_tensor, is_plain

# Box of a tensor in local memory: its offsets, one per dimension, and its elements.
LocalBox: TypeAlias = tuple[tuple[int, ...], torch.Tensor]


class LocalBoxes(torch.Tensor):
    """Tensor of a global shape, of which this rank holds boxes in its own memory: for sharding other than DTensor's.

        rows = LocalBoxes((1024, 512), [((256, 0), part)])          # `part`: rows from 256 on, shape [rows, 512]
        flat = LocalBoxes.from_flat((1024, 512), 40_000, elements)  # elements from 40,000 on of the flattened tensor
        checkpoints.save(step, {"model": {"weight": rows}, "optim": {"weight": flat}})

    In a state dict it is saved and loaded as a DTensor is, by `CheckpointManager`, `dcp.save` and `dcp.load`, at any
    world size. The checkpoint holds one tensor of the global shape, which can be loaded with any other sharding: as
    other boxes, as DTensor, or whole. A load reads into the memory of the boxes, without a copy where that is
    contiguous. A save in the background copies that memory into kept memory, as of any tensor; boxes that are views of
    one flat buffer are copied as that buffer, once.

    All ranks' boxes together must cover each element once. Equal boxes on several ranks are replicas, of which one is
    stored. A save in which elements are in no box, or different boxes overlap, raises `InvalidArgumentError` on all
    ranks and commits nothing. A rank without a box says so by an empty list and a dtype.

    An instance has shape, dtype and device, but no elements: operations of torch raise `InvalidArgumentError`. An
    instance must be a value of a dict or a list in the state: tuples, other objects and `PerRank` cannot hold it.

    Args:
        shape: Global shape of the tensor; d sizes.
        boxes: Offsets (d integers) and elements (shape [sizes of the box], d dimensions) of each box of this rank, in
            any order. Plain strided tensors on any device, which are not copied. Boxes without elements are left out.
        dtype: dtype of the tensor; None is that of the boxes.

    Raises:
        InvalidArgumentError: A box is outside of the shape, overlaps another one, or has another dtype or number of
            dimensions; is not a plain tensor in memory; or there is neither a box nor a dtype. Names the box.
    """

    _pieces: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(
        cls: type[Self],
        shape: Sequence[int],
        boxes: Iterable[tuple[Sequence[int], torch.Tensor]] = (),
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Check the boxes; costs microseconds a box, and copies nothing."""
        sizes = _to_integers(shape)
        if any(size < 0 for size in sizes):
            raise InvalidArgumentError("A shape has no negative sizes.", shape=sizes)
        given = [(_to_integers(offsets), tensor) for offsets, tensor in boxes]
        if dtype is None and not given:
            raise InvalidArgumentError("A rank without a box must name the dtype: pass dtype=.", shape=sizes)
        for offsets, tensor in given:
            dtype = tensor.dtype if dtype is None and isinstance(tensor, torch.Tensor) else dtype
            _require_fit(sizes, dtype, offsets, tensor)
        assert dtype is not None
        pieces = [(offsets, tensor.detach()) for offsets, tensor in given if tensor.numel()]
        _require_disjoint(sizes, [Box(offsets, tuple(tensor.shape)) for offsets, tensor in pieces])
        if 0 in sizes:
            # Every rank plans the whole, as a replica: without any chunk, the checkpoint would not have the tensor.
            pieces = [((0,) * len(sizes), empty_tensor(dtype, sizes))]
        return cls._of(sizes, dtype, dict(pieces))

    @classmethod
    def from_flat(cls, shape: Sequence[int], start: int, flat: torch.Tensor) -> Self:
        """Return the boxes of a range of the flattened tensor, as views of `flat`: at most `2 * d - 1` of them.

        Args:
            shape: Global shape of the tensor; d sizes.
            start: Number of the first element in row-major order. Any number if `flat` is empty.
            flat: Elements from `start` on, shape [elements], without padding; may be empty.

        Raises:
            InvalidArgumentError: `flat` has not one dimension, or is not a plain tensor in memory; or the range reaches
                outside of the tensor.
        """
        sizes, elements = _to_integers(shape), math.prod(_to_integers(shape))
        _require_plain(sizes, (start,), flat)
        if flat.dim() != 1:
            raise InvalidArgumentError(
                "A range of a flattened tensor must have one dimension. Pass flat.view(-1).", shape=tuple(flat.shape)
            )
        stop = start + len(flat)
        if not len(flat):
            return cls(sizes, dtype=flat.dtype)
        if start < 0 or stop > elements:
            raise InvalidArgumentError(
                "A range reaches outside of its tensor. Cut off what is padding.",
                shape=sizes,
                elements=elements,
                start=start,
                stop=stop,
            )
        flat = flat.detach()
        boxes = boxes_of_run(sizes, start, stop)
        pieces = {box.offsets: flat[n - start : n - start + box.elements].view(box.sizes) for n, box in boxes}
        return cls._of(sizes, flat.dtype, pieces)

    @property
    def boxes(self) -> tuple[LocalBox, ...]:
        """Offsets and memory of each box of this rank."""
        return tuple(self._pieces.items())

    def replace_memory(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the same boxes with other memory.

        Args:
            replace: Function from the elements of a box to others, of the same shape and dtype.
        """
        pieces = {offsets: replace(tensor) for offsets, tensor in self._pieces.items()}
        return self._of(tuple(self.shape), self.dtype, pieces)

    @classmethod
    def _of(cls, sizes: tuple[int, ...], dtype: torch.dtype, pieces: dict[tuple[int, ...], torch.Tensor]) -> Self:
        device = next((tensor.device for tensor in pieces.values()), torch.device("cpu"))
        tensor = torch.Tensor._make_wrapper_subclass(cls, sizes, dtype=dtype, device=device)
        tensor._pieces = pieces
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]  # as DTensor's
        held = [(offsets, tuple(tensor.shape)) for offsets, tensor in self.boxes]
        return f"LocalBoxes(shape={tuple(self.shape)}, dtype={self.dtype}, offsets and sizes: {held})"

    # ---- torch's protocol of tensors that plan themselves (torch/distributed/_checkpointable.py)

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        """Return an item for each box. Called by the planner of a save."""
        # Equal on all ranks, wherever they keep their boxes: the first rank's are stored.
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes. Called by the planner of a load."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=tensor.size())
            for offsets, tensor in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of the box at an offset. Called by both planners."""
        piece = self._pieces.get(tuple(index.offset or ()))
        if piece is None:
            raise InvalidArgumentError(
                "A planner asks for a box that this rank does not hold.",
                tensor=index.fqn,
                offsets=index.offset,
                boxes=self,
            )
        return piece

    # ---- operations

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch's own

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub declares it without `cls`
        cls, func: Any, _types: object, args: Sequence[Any] = (), _kwargs: Mapping[str, Any] | None = None
    ) -> LocalBoxes:
        """Refuse all operations but the one by which the stager of `dcp.async_save` makes a copy.

        That stager gives the result copies of all attributes (torch/distributed/checkpoint/_state_dict_stager.py).
        """
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            return cls._of(tuple(args[1]), args[0].dtype, {})
        raise InvalidArgumentError(
            "A LocalBoxes has no elements of its own to compute with. Use the tensors of its `boxes`.",
            operation=str(func),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same boxes in copied memory; what was shared stays shared."""
        copied = self.replace_memory(lambda tensor: copy.deepcopy(tensor, memo))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled: of an object that holds this one, a load would give all ranks the boxes of one."""
        raise InvalidArgumentError(
            "A LocalBoxes inside an object cannot be stored, because every rank holds other parts, nor sent to another "
            "process (AsyncCheckpointerType.PROCESS). Make it a value of a dict or a list in the state, and save in a "
            "thread.",
            boxes=self,
        )


def _to_integers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(operator.index(value) for value in values)


def _require_plain(shape: tuple[int, ...], offsets: tuple[int, ...], tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or not is_plain(tensor) or tensor.is_quantized or tensor.is_meta:
        raise InvalidArgumentError(
            "A box is no plain strided tensor in memory. Give the local tensor, as DTensor.to_local() returns it.",
            shape=shape,
            offsets=offsets,
            type=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
            device=str(tensor.device) if isinstance(tensor, torch.Tensor) else None,
        )
    return tensor


def _require_fit(shape: tuple[int, ...], dtype: torch.dtype | None, offsets: tuple[int, ...], tensor: object) -> None:
    """Check one box against the tensor that it is a part of."""
    tensor = _require_plain(shape, offsets, tensor)
    sizes = tuple(tensor.shape)
    details = {"shape": shape, "offsets": offsets, "sizes": sizes}
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidArgumentError(
            "A box has another dtype than its tensor. Convert it, or declare its dtype.",
            **details,
            dtype=dtype_name(tensor.dtype),
            declared=dtype_name(dtype),
        )
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise InvalidArgumentError(
            "A box has another number of dimensions than its tensor. For a range of a flattened tensor, use "
            "LocalBoxes.from_flat.",
            **details,
        )
    if any(offset < 0 or offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise InvalidArgumentError(
            "A box reaches outside of its tensor. Correct the offsets, or declare the global shape.", **details
        )


def _require_disjoint(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    # Along the dimension in which most boxes differ, so that few pairs are compared.
    axis = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in boxes}), default=0)
    ordered = sorted(boxes, key=lambda box: box.offsets[axis:])
    for number, one in enumerate(ordered):
        for other in islice(ordered, number + 1, None):
            if shape and other.offsets[axis] >= one.offsets[axis] + one.sizes[axis]:
                break
            if one.intersection(other) is not None:
                raise InvalidArgumentError(
                    "Two boxes of a rank overlap. Give each element of the tensor once.",
                    shape=shape,
                    offsets=one.offsets,
                    sizes=one.sizes,
                    other_offsets=other.offsets,
                    other_sizes=other.sizes,
                )
