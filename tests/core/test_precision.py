"""Number formats without torch agree with torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculators_core.precision import CODES, SIZES, all_finite, cast, castable

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def spread(dtype):
    """Finite values of all magnitudes and both signs, half-way cases and zeros among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    ties = (torch.arange(1 << 16).to(torch.int32) << 16 | 0x8000).view(torch.float32)
    values = torch.cat([values, ties, torch.tensor([0.0, -0.0, 65504.0, 65520.0, -65519.9])])
    values = values.to(dtype)
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("found", FLOATS)
def test_a_cast_rounds_as_torch_does(found, wanted):
    values = spread(FLOATS[found])
    expected = values.to(FLOATS[wanted])
    assert np.array_equal(cast(raw(values), found, wanted), raw(expected))


@pytest.mark.parametrize("found", ["int32", "int16", "int8", "uint8"])
def test_integers_become_ids_and_flags(found):
    values = torch.tensor([0, 1, 5, 100]).to(getattr(torch, found))
    assert cast(raw(values), found, "int64").view(np.int64).tolist() == [0, 1, 5, 100]
    assert cast(raw(values), found, "bool").tolist() == [0, 1, 1, 1]


def test_formats_that_mean_different_things_are_not_cast():
    assert not castable("int8", "float16")
    assert not castable("float16", "int64")
    assert not castable("float8_e4m3fn", "bfloat16")
    assert not castable("bool", "int64")
    assert castable("float8_e4m3fn", "float8_e4m3fn")
    assert castable("uint8", "bool")


@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_is_judged_as_torch_judges_it(dtype):
    size = SIZES[dtype]
    high = torch.arange(1 << 8 * min(size, 2))
    bits = high << 8 * (size - min(size, 2))
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    values = bits.to(as_int).view(getattr(torch, dtype))
    finite = torch.isfinite(values if size > 1 else values.float())
    flags = [all_finite(piece, dtype) for piece in raw(values).reshape(-1, size)]
    assert flags == finite.tolist()


@pytest.mark.parametrize("at", [0, 17, 999])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_value_anywhere_is_found(dtype, bad, at):
    values = torch.randn(1000).to(FLOATS[dtype])
    assert all_finite(raw(values), dtype)
    values[at] = bad
    assert not all_finite(raw(values), dtype)


def test_every_format_has_a_size_and_a_code():
    assert CODES.keys() == SIZES.keys()
