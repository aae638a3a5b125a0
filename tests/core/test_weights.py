"""Weights are written a piece at a time, whole or in shards, and every value is looked at."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from speculators_core.errors import CheckpointError
from speculators_core.vocabulary import check_vocab_map
from speculators_core.weights import Pending, weight_files, write_weights


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def pending(name, tensor, pieces=1):
    def halves():
        yield from np.split(raw(tensor), pieces)

    return Pending(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), halves)


def write(directory, tensors, **more):
    return list(write_weights(directory, [pending(n, t) for n, t in tensors.items()], **more))


TENSORS = {
    "half": torch.randn(33, 7).half(),
    "wide": torch.randn(5),
    "brain": torch.randn(3, 3).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.arange(9),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(2.0),
    "eighth": torch.randn(4, 4).to(torch.float8_e4m3fn),
}


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and (raw(one) == raw(other)).all()


def test_what_is_written_reads_back_equal_in_every_dtype(tmp_path):
    assert set(write(tmp_path, TENSORS)) == set(TENSORS)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(same(read[name], tensor) for name, tensor in TENSORS.items())
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_pieces_are_put_together(tmp_path):
    tensor = torch.randn(64)
    list(write_weights(tmp_path, [pending("x", tensor, pieces=8)]))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], tensor)


def test_shards_stay_below_their_limit_and_their_index_is_right(tmp_path):
    tensors = {f"t{i}": torch.full((100 * (i + 1),), float(i)) for i in range(6)}
    write(tmp_path, tensors, max_shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 2100
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00006.safetensors" for i in range(1, 7)]
    assert weight_files(tmp_path).keys() == {tmp_path / file for file in files}
    for name, tensor in tensors.items():
        with safe_open(tmp_path / index["weight_map"][name], framework="pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)


def test_small_tensors_share_a_shard(tmp_path):
    write(tmp_path, {f"t{i}": torch.zeros(10) for i in range(5)}, max_shard_bytes=80)
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert [sorted(places.values()).count(f) for f in sorted(set(places.values()))] == [2, 2, 1]


def test_what_fits_in_one_file_has_no_index(tmp_path):
    write(tmp_path, TENSORS, max_shard_bytes=1 << 20)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_no_number_is_named_wherever_it_lies(tmp_path, dtype, bad):
    tensor = torch.randn(64).to(dtype)
    tensor[41] = bad
    with pytest.raises(CheckpointError, match="fc holds NaN or infinity"):
        list(write_weights(tmp_path, [pending("fc", tensor, pieces=4)]))


def test_a_source_that_gives_too_few_bytes_is_refused(tmp_path):
    short = Pending("x", (9,), "float32", lambda: [np.zeros(32, np.uint8)])
    with pytest.raises(CheckpointError, match="32 bytes, its shape needs 36"):
        list(write_weights(tmp_path, [short]))


def test_a_map_that_names_a_token_twice_is_refused():
    t2d = np.array([True, True, False])
    check_vocab_map(np.array([0, 0]), t2d, where="x")
    with pytest.raises(CheckpointError, match="names 1 in 2 places"):
        check_vocab_map(np.array([1, 0]), t2d, where="x")
