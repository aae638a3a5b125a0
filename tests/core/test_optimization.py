"""Optimisers, schedules and the order of the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speculators_core.params import TrainParams
from speculators_core.training.optimization import Optimization
from speculators_core.training.order import Order
from speculators_core.training.schedule import Schedule, planned
from speculators_core.training.world import World


def params(**changes: object) -> TrainParams:
    return TrainParams.model_validate({"data": "d", "verifier": "v", **changes})


def tensors() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"fc.weight": (8, 12), "layers.0.mlp.up_proj.weight": (6, 8), "norm.weight": (8,)}
    shapes["lm_head.weight"] = (10, 8)
    return {name: nn.Parameter(torch.randn(*shape)) for name, shape in shapes.items()}


def stepped(optimization: Optimization, seeds: range, rate: float = 0.01) -> dict[str, Tensor]:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in optimization.trainable.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimization.clip()
        optimization.step(rate)
    return {name: p.detach().clone() for name, p in optimization.trainable.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_remembered_goes_on_exactly(optimizer: str) -> None:
    """C5: five steps, saved, loaded and five more are ten steps."""
    chosen = params(optimizer=optimizer, weight_decay=0.1)
    whole = stepped(Optimization(chosen, tensors()), range(10))
    first = Optimization(chosen, tensors())
    half = stepped(first, range(5))
    second = Optimization(chosen, {n: nn.Parameter(t) for n, t in half.items()})
    second.load(first.state())
    for name, tensor in stepped(second, range(5, 10)).items():
        assert torch.equal(tensor, whole[name]), name


def test_muon_moves_the_layers_matrices_and_adamw_the_rest() -> None:
    adamw, muon = (
        stepped(Optimization(params(optimizer=o), tensors()), range(1)) for o in ("adamw", "muon")
    )
    changed = {name for name in adamw if not torch.equal(adamw[name], muon[name])}
    assert changed == {"fc.weight", "layers.0.mlp.up_proj.weight"}
    step = muon["fc.weight"] - tensors()["fc.weight"].detach()
    spread = torch.linalg.svdvals(step)
    assert spread.max() < 2.5 * spread.min()  # orthogonalised: all directions move alike


def test_the_gradient_is_shortened_to_the_limit() -> None:
    optimization = Optimization(params(grad_clip=0.5), tensors())
    for parameter in optimization.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    norm = optimization.clip()
    assert norm == pytest.approx(sum(p.numel() for p in optimization.trainable.values()) ** 0.5)
    left = sum(float((p.grad**2).sum()) for p in optimization.trainable.values()) ** 0.5
    assert left == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant_with_warmup", 1.0, 1.0)],
)
def test_schedules_warm_up_and_end_where_they_say(schedule: str, middle: float, end: float) -> None:
    plan = planned(params(schedule=schedule, warmup_ratio=0.1), 100)
    factors = [plan.factor(step) for step in range(101)]
    assert 0 < factors[0] < factors[5] < factors[9] < 1
    assert factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(middle)
    assert factors[100] == pytest.approx(end, abs=1e-9)


def test_a_constant_rate_is_constant_from_the_first_step_on() -> None:
    plan = planned(params(schedule="constant"), 50)
    assert {plan.factor(step) for step in range(51)} == {1.0}
    plan.shorten(10, 20)
    assert (plan.total, plan.factor(15)) == (20, 1.0)
    assert Schedule.of(plan.state()) == plan


class _Lengths:
    """As much of a prepared data set as the order asks for."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def document(self, number: int) -> tuple[Tensor, Tensor]:
        length = int(self.lengths[number])
        return torch.zeros(length, dtype=torch.int64), torch.ones(length, dtype=torch.bool)


def order(rows: int) -> Order:
    documents = _Lengths([5, 9, 3, 7, 8, 4, 6])
    return Order(documents, list(range(7)), seed=3, epochs=2, budget=12, rows=rows)


def test_an_epoch_trains_every_document_once_wherever_it_is_taken_up() -> None:
    for rows in (1, 2, 3):
        steps = order(rows).steps(1)
        for done in range(len(steps) + 1):
            before, after = order(rows).steps(1)[:done], order(rows).steps(1)[done:]
            trained = [d for step in before + after for row in step for d in row]
            assert sorted(trained) == list(range(7))
        assert order(rows).total() == len(order(rows).steps(0)) + len(steps)


def test_processes_share_the_rows_that_one_would_train() -> None:
    """C9: 7 documents on 2 processes, every one in as many steps."""
    alone = order(2).steps(0)
    for step in alone:
        shares = [World(rank, 2).mine(step, 1) for rank in range(2)]
        assert all(len(share) == 1 for share in shares)
        assert [row for share in shares for row in share if row is not None] == step


def test_live_chains_are_those_of_all_rows_of_a_step() -> None:
    given = order(2)
    step = given.steps(0)[0]
    tokens = [int(given.prepared.lengths[d]) for row in step for d in row]
    assert given.live(step, 3).tolist() == [sum(t - 2 - k for t in tokens) for k in range(3)]
