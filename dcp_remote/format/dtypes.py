"""Element types of torch by name, without torch: bytes per element, and the name in safetensors."""

from __future__ import annotations

# torch 2.13: `str(dtype)[6:]` and `itemsize` of every dtype. A test compares this table with torch's own list.
ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(["bool", "uint8", "int8", "quint8", "qint8", "quint4x2", "quint2x4"], 1),
    **dict.fromkeys(["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"], 1),
    **dict.fromkeys(["float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"], 1),
    **dict.fromkeys([f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)], 1),
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16", "bits16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32", "qint32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}

# Dtypes that the safetensors library opens under torch. Others are U8 in a shard; the manifest has their dtype.
SAFETENSORS_NAMES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
