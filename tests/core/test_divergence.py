"""What drafts are trained to make small: values and slopes are those of the plain formulas."""

from __future__ import annotations

import pytest
import torch
from speculators.losses import eager
from torch import Tensor

from speculators_core.errors import InputError
from speculators_core.params import LOSSES, JobKind, TrainParams, loss_weights, parse_params
from speculators_core.training.divergence import DIVERGENCES, mixture

ROWS, WIDTH = 6, 11


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def plain(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The formula as a textbook has it."""
    if name == "js":
        mean = (p + q) / 2
        return (plain("kl", p, mean) + plain("kl", q, mean)) / 2
    if name == "lk_hybrid":
        share = (-3 * overlap(p, q).detach()).exp()
        return share * plain("kl", p, q) + (1 - share) * plain("tv", p, q)
    return {
        "kl": lambda: (p * (p / q).log()).sum(-1),
        "reverse_kl": lambda: (q * (q / p).log()).sum(-1),
        "tv": lambda: (p - q).abs().sum(-1) / 2,
        "nla": lambda: -overlap(p, q).log(),
    }[name]()


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft logits, verifier logits, p and its entropy."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(ROWS, WIDTH, dtype=dtype)
    theirs = 2 * torch.randn(ROWS, WIDTH, dtype=dtype)
    p = theirs.softmax(-1)
    return logits, theirs, p, -(p * p.log()).sum(-1)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_slope_are_those_of_the_plain_formula(name: str) -> None:
    logits, _, p, entropy = drawn(torch.float64)
    value, slope = DIVERGENCES[name](logits.log_softmax(-1), p, entropy)
    leaf = logits.clone().requires_grad_()
    expected = plain(name, p, leaf.softmax(-1))
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(value, expected.detach(), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(slope, gradient, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("kl", eager.kl_div_loss),
        ("reverse_kl", eager.reverse_kl_div_loss),
        ("js", eager.js_div_loss),
        ("tv", eager.tv_loss),
        ("nla", eager.neg_log_acceptance_loss),
        ("lk_hybrid", eager.lk_hybrid_loss),
    ],
)
def test_each_is_what_speculators_computes(name: str, theirs: object) -> None:
    logits, verifier, p, entropy = drawn(torch.float32)
    value, slope = DIVERGENCES[name](logits.log_softmax(-1), p, entropy)
    leaf = logits.clone().requires_grad_()
    expected = theirs(leaf[None], verifier[None])[0]
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(value, expected.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(slope, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_verifier_that_is_certain_gives_no_infinity(name: str) -> None:
    logits, _, _, _ = drawn(torch.float32)
    p = torch.zeros(ROWS, WIDTH)
    p[:, 3] = 1.0
    value, slope = DIVERGENCES[name](logits.log_softmax(-1), p, torch.zeros(ROWS))
    assert torch.isfinite(value).all() and torch.isfinite(slope).all()


def test_a_mixture_is_the_weighted_sum() -> None:
    logits, _, p, entropy = drawn(torch.float64)
    log_q = logits.log_softmax(-1)
    value, slope = mixture(loss_weights("kl:0.9, tv:0.1"))(log_q, p, entropy)
    kl, tv = (DIVERGENCES[name](log_q, p, entropy) for name in ("kl", "tv"))
    torch.testing.assert_close(value, 0.9 * kl[0] + 0.1 * tv[0])
    torch.testing.assert_close(slope, 0.9 * kl[1] + 0.1 * tv[1])


def test_every_name_has_a_formula() -> None:
    assert set(LOSSES) == set(DIVERGENCES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hinge", "there is no loss 'hinge'"),
        ("kl:0.5,hinge:0.5", "there is no loss 'hinge'"),
        ("kl,kl:2", "named twice"),
        ("kl:much", "no number"),
        ("kl:0", "above 0"),
        ("kl:nan", "above 0"),
        ("", "there is no loss"),
    ],
)
def test_other_losses_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_params(JobKind.TRAIN, {"data": "d", "verifier": "v", "loss": text})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedule": "constant", "warmup_ratio": 0.1}, "choose constant_with_warmup"),
        ({"held_out": "prompts.jsonl", "evaluate_every": 0}, "evaluate_every is 0"),
        ({"evaluate_prompts": 8, "evaluate_every": 0}, "evaluate_prompts .* evaluate_every is 0"),
        ({"evaluate_tokens": 32, "evaluate_every": 0}, "evaluate_tokens .* evaluate_every is 0"),
        ({"ttt_steps": 1, "ttt_step_loss_decay": 0.8}, "ttt_steps is 1"),
        ({"sharding": "fsdp"}, "more than one process"),
        ({"sharding": "fsdp", "processes": 2, "optimizer": "muon"}, "choose sharding ddp"),
        ({"nodes": 2}, "HOST:PORT"),
        ({"rendezvous": "host:1234"}, "nodes is 1"),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "host:1234"}, "which is 1"),
        ({"dtype": "float16"}, "'float32' or 'bfloat16'"),
        ({"autocast": "float16"}, "'off' or 'bfloat16'"),
    ],
)
def test_options_that_would_be_ignored_or_harm_are_refused(
    values: dict[str, object], said: str
) -> None:
    """C7: float16 is not on offer; C13: a constant schedule would ignore its warm-up, a run that
    measures nothing how it should measure, a single step how later ones are weighed."""
    with pytest.raises(InputError, match=said):
        parse_params(JobKind.TRAIN, {"data": "d", "verifier": "v", **values})
    assert TrainParams(data="d", verifier="v", schedule="constant").warmup_ratio is None
