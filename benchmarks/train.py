"""Training against speculators 0.9.0: tokens a second and peak memory, in one run.

The same draft (SmolLM2-135M's shape, one layer), the same packed chats, three unrolled steps and
seven, the same forward KL loss, AdamW on the same tensors; speculators with its eager loss and
attention, as it runs on a CPU. Chats and states are random numbers of SmolLM2's widths, equal on
both sides: what is computed does not depend on their values. Tokens are all positions of the row:
nothing is padding.

Each trainer is a process of its own, which does nothing else; their steps take turns, so that what
else the machine does slows both. Memory is the largest RssAnon of that process during its first two
steps, which are not timed (/proc, read every 2 ms from outside): model, data, optimiser and
interpreter are in it, mapped files (torch's libraries, the same for both) are not.
`training_memory_mb` is what the steps add to what was there before the first. The ratios on top are
those of three steps.

    python benchmarks/train.py [--quick] [--json] [--ttt-steps 3,7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
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
_SAMPLE_S = 0.002


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


def rss_anon(pid: int) -> int:
    """Bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


class Memory:
    """The largest RssAnon of a process while it is open, and what it was `before`, in bytes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.before = self.most = rss_anon(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.most = max(self.most, rss_anon(self.pid))


def be(side: str, count: int, ttt_steps: int) -> None:
    """Be one of the trainers: a step for every line on stdin, its seconds on stdout."""
    step = SIDES[side](count, ttt_steps)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)


class Trainer:
    """One side in a process of its own."""

    def __init__(self, side: str, count: int, ttt_steps: int) -> None:
        command = [sys.executable, __file__, "--be", side, "--chats", str(count)]
        self._process = subprocess.Popen(
            [*command, "--ttt-steps", str(ttt_steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        """Wait until it has model and data."""
        self._said()

    def step(self) -> float:
        """Seconds of one step."""
        assert self._process.stdin
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._said())

    def memory(self) -> Memory:
        """What its first steps take: the optimiser's state is made in the first, and all of it is
        there in the second."""
        with Memory(self._process.pid) as memory:
            for _ in range(2):
                self.step()
        return memory

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _said(self) -> str:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError(f"a trainer ended with status {self._process.wait()}")


def compared(count: int, ttt_steps: int, rounds: int) -> dict[str, Any]:
    trainers = {side: Trainer(side, count, ttt_steps) for side in SIDES}
    for trainer in trainers.values():
        trainer.ready()
    memory = {side: trainer.memory() for side, trainer in trainers.items()}
    spent: dict[str, list[float]] = {side: [] for side in trainers}
    for _ in range(rounds):
        for side, trainer in trainers.items():
            spent[side].append(trainer.step())
    for trainer in trainers.values():
        trainer.end()
    seconds = {side: statistics.median(each) for side, each in spent.items()}
    tokens = count * CHAT
    return {
        "tokens_per_second_ratio": seconds["theirs"] / seconds["ours"],
        "peak_memory_ratio": memory["ours"].most / memory["theirs"].most,
        "tokens_per_second": {side: tokens / s for side, s in seconds.items()},
        "peak_memory_mb": {side: m.most / 1e6 for side, m in memory.items()},
        "training_memory_mb": {side: (m.most - m.before) / 1e6 for side, m in memory.items()},
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="within 60 s on two cores")
    parser.add_argument("--chats", type=int, help="in a row; by itself 8, or 4 where quick")
    parser.add_argument("--ttt-steps", help="draft steps unrolled, with commas; 3,7, or 3 if quick")
    parser.add_argument("--be", choices=tuple(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    depths = [int(n) for n in (args.ttt_steps or ("3" if args.quick else "3,7")).split(",")]
    count, rounds = args.chats or (4 if args.quick else 8), 3 if args.quick else 5
    if args.be:
        be(args.be, count, depths[0])
        return
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
