"""The number formats of checkpoint tensors, without torch: sizes, finiteness, casts.

Formats go by torch's names (`bfloat16`); safetensors has codes of its own (`BF16`). Raw values are
one-dimensional uint8 arrays, little-endian as safetensors stores them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Raw = NDArray[np.uint8]

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}
SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes a value."""

# the bits of the smallest pattern, sign apart, that is no finite number
_NOT_FINITE = {
    "float64": 0x7FF0_0000_0000_0000, "float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C,
}  # fmt: skip
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def castable(found: str, wanted: str) -> bool:
    """Whether values of one format may be written as another: among floats, and integers as int64
    or as flags.
    """
    if found == wanted:
        return found in SIZES
    if found in _FLOATS:
        return wanted in _FLOATS
    return "int" in found and found in SIZES and wanted in ("int64", "bool")


def all_finite(raw: Raw, dtype: str) -> bool:
    """Whether no value is NaN or infinite.

    Ordered as integers, such patterns are the largest of either sign: two maxima over the bits
    find them, without a temporary array and faster than memory delivers the values.
    """
    first = _NOT_FINITE.get(dtype)
    if first is None or not raw.size:
        return True
    size = SIZES[dtype]
    sign = 1 << (8 * size - 1)
    positive, negative = raw.view(f"<i{size}").max(), raw.view(f"<u{size}").max()
    return bool(int(positive) < first and int(negative) < first | sign)


def cast(raw: Raw, found: str, wanted: str) -> Raw:
    """Values in another format, rounded to nearest even as torch does. `castable` must hold.

    Finite values that the format can't hold become infinite.
    """
    if found == wanted:
        return raw
    if found in _FLOATS:
        return _from_float(_to_float(raw, found), wanted)
    numbers: NDArray[np.integer] = raw.view(found)
    if wanted == "bool":
        flags: NDArray[np.bool_] = np.not_equal(numbers, 0)
        return flags.view(np.uint8)
    return numbers.astype(np.int64).view(np.uint8)


def _to_float(raw: Raw, found: str) -> NDArray[np.floating]:
    if found == "bfloat16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view(found)


def _from_float(values: NDArray[np.floating], wanted: str) -> Raw:
    with np.errstate(over="ignore"):
        if wanted == "float64":
            return values.astype(np.float64).view(np.uint8)
        single = values.astype(np.float32, copy=False)  # as torch does from double to half
        if wanted == "float32":
            return single.view(np.uint8)
        if wanted == "float16":
            return single.astype(np.float16).view(np.uint8)
        bits = single.view(np.uint32)
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))
        return (rounded >> 16).astype(np.uint16).view(np.uint8)
