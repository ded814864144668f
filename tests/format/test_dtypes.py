"""The tables of element types against torch's own list and the dtypes that the safetensors library opens."""

from __future__ import annotations

import safetensors.torch
import torch

from dcp_remote.format.dtypes import ITEM_BYTES, SAFETENSORS_NAMES


def test_every_dtype_of_torch() -> None:
    """Return names (as in `str(dtype)`) and sizes of all dtypes in torch's namespace."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes} == ITEM_BYTES
    for name in ITEM_BYTES:
        assert isinstance(getattr(torch, name), torch.dtype), "a reader finds the dtype by this name"


def test_safetensors_names() -> None:
    """Our table is a part of that of the library; other dtypes of the library are stored as bytes."""
    theirs = {str(dtype).removeprefix("torch."): name for name, dtype in safetensors.torch._TYPES.items()}
    assert SAFETENSORS_NAMES.items() <= theirs.items()
    # Newer than the oldest library in use; a reader that does not know a name refuses the whole file.
    assert theirs.keys() - SAFETENSORS_NAMES.keys() == {"float8_e4m3fnuz", "float8_e5m2fnuz"}
    assert SAFETENSORS_NAMES.keys() <= ITEM_BYTES.keys()


def test_the_library_opens_each_of_them_with_its_size() -> None:
    """Two zeros of each dtype are written and read by the library."""
    for name in SAFETENSORS_NAMES:
        dtype = getattr(torch, name)
        data = safetensors.torch.save({"t": torch.zeros(2, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)})
        opened = safetensors.torch.load(data)["t"]
        assert (opened.dtype, opened.nbytes) == (dtype, 2 * ITEM_BYTES[name])
