"""Real vLLM on the CPU drafts with what DFlash drafts and EAGLE heads were converted to, and drafts
the very tokens that the heads mean: a few lines of torch here say which.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from app.services import broker
from app.services.views import DeploymentView
from speculators_core.conversion.convert import convert
from speculators_core.params import ConvertParams
from tests import tiny
from tests.core.layouts import families
from tests.core.layouts.families import Family
from tests.serving import ServingLab

# heads of 32, because vLLM's CPU attention knows no narrower ones
FAMILY = Family(hidden=64, heads=4, kv_heads=2, head_dim=32, inner=128, vocab=256, layers=2, seed=2)
PROMPT = [(37 * i + 11) % 250 for i in range(24)]
Reference = Callable[[dict[str, Tensor], Any, list[int]], list[int]]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, positions: Tensor, theta: float = 1e6) -> Tensor:
    """`x` [heads, S, head_dim], its two halves turned against each other."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def mlp(w: dict[str, Tensor], p: str, x: Tensor) -> Tensor:
    gate = silu(linear(x, w[f"{p}mlp.gate_proj.weight"]))
    return linear(gate * linear(x, w[f"{p}mlp.up_proj.weight"]), w[f"{p}mlp.down_proj.weight"])


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, FAMILY.head_dim)).transpose(0, 1)


def attention(w: dict[str, Tensor], p: str, x: Tensor, seen: Tensor, causal: bool) -> Tensor:
    """`x` [S, H] looks at `seen` [T, H], whose last S rows are its own places."""
    q, k, v = (
        heads(linear(y, w[f"{p}self_attn.{n}_proj.weight"]))
        for n, y in (("q", x), ("k", seen), ("v", seen))
    )
    if f"{p}self_attn.q_norm.weight" in w:
        q, k = rms(q, w[f"{p}self_attn.q_norm.weight"]), rms(k, w[f"{p}self_attn.k_norm.weight"])
    places = torch.arange(len(seen)).float()
    q, k = rotated(q, places[-len(x) :]), rotated(k, places)
    out = scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=causal, enable_gqa=True
    )[0]
    return linear(out.transpose(0, 1).flatten(1), w[f"{p}self_attn.o_proj.weight"])


def eagle_draft(w: dict[str, Tensor], verifier: Any, tokens: list[int]) -> list[int]:
    """The first token that an EAGLE head proposes after `tokens`."""
    ids = torch.tensor([tokens])
    states = verifier(ids, output_hidden_states=True).hidden_states[-1][0, :-1]
    x = torch.cat([w["embed_tokens.weight"][ids[0, 1:]], states], dim=-1)
    x = linear(x, w["fc.weight"])
    for i in range(FAMILY.layers):
        p = f"layers.{i}."
        y = rms(x, w[f"{p}input_layernorm.weight"]) if i else x
        x = x + attention(w, p, y, y, causal=True)
        x = x + mlp(w, p, rms(x, w[f"{p}post_attention_layernorm.weight"]))
    return [int(verifier.lm_head(x[-1]).argmax())]


def dflash_draft(w: dict[str, Tensor], verifier: Any, tokens: list[int]) -> list[int]:
    """The block that a DFlash draft proposes after `tokens`."""
    states = verifier(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    aux = torch.cat([states[k + 1][0] for k in (1, 3, 5)], dim=-1)
    context = rms(linear(aux, w["fc.weight"]), w["hidden_norm.weight"])
    block = [tokens[-1]] + [FAMILY.vocab - 1] * (3 + FAMILY.seed)
    x = verifier.model.embed_tokens(torch.tensor(block))
    for i in range(FAMILY.layers):
        p = f"layers.{i}."
        y = rms(x, w[f"{p}input_layernorm.weight"])
        x = x + attention(w, p, y, torch.cat([context, y]), causal=False)
        x = x + mlp(w, p, rms(x, w[f"{p}post_attention_layernorm.weight"]))
    logits = verifier.lm_head(rms(x, w["norm.weight"]))
    return [int(token) for token in logits[1:].argmax(-1)]


@pytest.mark.prove
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("make", "reference"),
    [(families.eagle, eagle_draft), (families.dflash, dflash_draft)],
    ids=["eagle", "dflash"],
)
def test_vllm_drafts_what_the_head_means(
    tmp_path: Path, serving_lab: ServingLab, make: Callable[..., Path], reference: Reference
) -> None:
    verifier = tiny.build_verifier(tmp_path / "verifier")
    draft = make(tmp_path / "draft", FAMILY)
    params = ConvertParams(checkpoint=str(draft), verifier=str(verifier))
    result = convert(params, tmp_path / "converted")
    assert result.deployable
    deployed = serving_lab.deploy(
        verifier=str(verifier),
        speculator=result.output,
        max_model_len=512,
        max_num_seqs=4,
        dtype="float32",
    )
    steps = drafted_steps(serving_lab.ready(deployed), serving_lab)
    serving_lab.stop(deployed)
    weights = load_file(draft / "model.safetensors")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(verifier).eval()
        expected = [reference(weights, model, tokens) for tokens, _ in steps]
    assert len(steps) >= 20
    right = sum(
        ours == vllms[: len(ours)] for ours, (_, vllms) in zip(expected, steps, strict=True)
    )
    assert right >= 0.95 * len(steps), (expected, steps)  # near-ties may fall either way


def drafted_steps(deployment: DeploymentView, lab: ServingLab) -> list[tuple[list[int], list[int]]]:
    """What was there before each step of one answer, and what vLLM drafted then."""
    body = {"model": deployment.served_name, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    reply = httpx.post(
        f"{deployment.endpoint}/v1/completions",
        json={**body, "ignore_eos": True},
        headers={"X-Request-Id": "families"},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text
    with lab.settings():
        records = broker.client().xrange(broker.trace_stream(deployment.id))
    told = [json.loads(fields.get(b"record") or fields["record"]) for _, fields in records]
    tokens, steps = list(PROMPT), []
    for record in told:
        if record["ev"] != "step" or "families" not in record["request_id"]:
            continue
        if record["drafted"]:
            steps.append((list(tokens), [token["id"] for token in record["drafted"]]))
        tokens += [token["id"] for token in record["emitted"]]
    return steps
