"""Training against speculators 0.9.0: tokens a second and peak memory, in one run.

The same draft (SmolLM2-135M's shape, one layer), the same packed chats, three unrolled steps and
seven, the same forward KL loss, AdamW on the same tensors; speculators with its eager loss and
attention, as it runs on a CPU. Steps of the two are interleaved; memory is what a fresh process
adds on top of model and data while it trains. Tokens are all positions of the row: nothing is
padding. The ratios on top are those of three steps.

    python benchmarks/train.py [--quick] [--json] [--ttt-steps 3,7]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speculators_core.config import Eagle3Config
from speculators_core.data.hidden_states import States
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.training.loss import TargetHead, unroll
from speculators_core.training.packing import Document, pack

H, V, DV = 576, 49152, 8192
CHAT, PROMPT = 256, 96  # tokens of a chat, and those that are not the assistant's
LR = 1e-3


def config() -> Eagle3Config:
    """SmolLM2-135M's shape."""
    return Eagle3Config.model_validate(
        {
            "draft_vocab_size": DV,
            "norm_before_residual": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
            "dtype": "float32",
            "speculators_config": {
                "proposal_methods": [{"speculative_tokens": 3}],
                "verifier": {"name_or_path": "none", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": {
                "hidden_size": H,
                "intermediate_size": 1536,
                "num_hidden_layers": 1,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "vocab_size": V,
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
            },
        }
    )


def documents(count: int) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(CHAT) >= PROMPT
    return [
        Document(
            torch.randint(0, V, (CHAT,), generator=generator),
            mask,
            States(
                torch.randn(CHAT, 3 * H, generator=generator),
                torch.randn(CHAT, H, generator=generator),
                torch.randint(0, V, (CHAT,), generator=generator).to(torch.int32),
            ),
        )
        for _ in range(count)
    ]


def kept() -> Tensor:
    mask = torch.zeros(V, dtype=torch.bool)
    mask[:: V // DV] = True
    return mask


def fresh_draft() -> Eagle3Draft:
    torch.manual_seed(0)
    draft = Eagle3Draft(config())
    draft.set_vocab_map(kept())
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
    return draft


def ours(count: int, ttt_steps: int) -> Callable[[], float]:
    draft, chats = fresh_draft(), documents(count)
    head = TargetHead(torch.nn.RMSNorm(H, eps=1e-5), torch.randn(V, H) * 0.05, kept())
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=LR)

    def step() -> float:
        batch = pack(chats)
        loss = unroll(draft, batch, head.targets(batch), steps=ttt_steps).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def theirs(count: int, ttt_steps: int) -> Callable[[], float]:
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    draft, chats = fresh_draft(), documents(count)
    settings = Eagle3SpeculatorConfig(**draft.config.model_dump(exclude={"speculators_config"}))
    settings.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(settings)
    own = draft.state_dict()
    own["verifier_norm.weight"] = torch.ones(H)
    own["verifier_lm_head.weight"] = torch.randn(DV, H) * 0.05
    model.load_state_dict(own, strict=False)
    del draft, own
    model.lm_head.weight.requires_grad = True  # frozen there; the same tensors train in both
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    loss_config = resolve_loss_config("kl_div", "eager")

    def step() -> float:
        # each chat loses its first position: (x[1:], g[:-1], y[1:], mask[1:])
        _, loss, _ = model(
            hidden_states=torch.cat([d.states.aux[:-1] for d in chats])[None],
            input_ids=torch.cat([d.ids[1:] for d in chats])[None],
            document_ids=torch.arange(count).repeat_interleave(CHAT - 1)[None],
            loss_mask=torch.cat([d.mask[1:] for d in chats])[None],
            position_ids=torch.arange(1, CHAT).repeat(count)[None],
            verifier_last_hidden_states=torch.cat([d.states.final[1:] for d in chats])[None],
            ttt_steps=ttt_steps,
            loss_config=loss_config,
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


SIDES = {"ours": ours, "theirs": theirs}


def peak_memory(side: str, count: int, ttt_steps: int) -> float:
    """MB that training adds to a process that has model, data and optimiser already."""
    command = [sys.executable, __file__, "--measure", side, "--chats", str(count)]
    command += ["--ttt-steps", str(ttt_steps)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(side: str, count: int, ttt_steps: int) -> float:
    step = SIDES[side](count, ttt_steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def times(count: int, ttt_steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each side, interleaved, after one step each to warm up."""
    steps = {side: make(count, ttt_steps) for side, make in SIDES.items()}
    spent: dict[str, list[float]] = {side: [] for side in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for side, step in steps.items():
            began = time.perf_counter()
            step()
            spent[side].append(time.perf_counter() - began)
    return spent


def compared(count: int, ttt_steps: int, rounds: int) -> dict[str, Any]:
    memory = {side: peak_memory(side, count, ttt_steps) for side in SIDES}
    spent = times(count, ttt_steps, rounds)
    seconds = {side: statistics.median(each) for side, each in spent.items()}
    tokens = count * CHAT
    return {
        "tokens_per_second_ratio": seconds["theirs"] / seconds["ours"],
        "peak_memory_ratio": memory["ours"] / memory["theirs"],
        "tokens_per_second": {side: tokens / s for side, s in seconds.items()},
        "peak_memory_mb": memory,
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="within 60 s on two cores")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--ttt-steps", default="3,7", help="draft steps unrolled, with commas")
    parser.add_argument("--measure", choices=tuple(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    depths = [int(steps) for steps in args.ttt_steps.split(",")]
    if args.measure:
        print(measure(args.measure, args.chats, depths[0]))
        return
    count, rounds = (2, 2) if args.quick else (args.chats, 5)
    found = {str(depth): compared(count, depth, rounds) for depth in depths}
    result = {
        **found[str(depths[0])],
        "by_ttt_steps": found,
        "threads": torch.get_num_threads(),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
