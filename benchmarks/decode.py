"""What the reference engine's loop costs beyond its models.

    python benchmarks/decode.py [--verifier DIR] [--speculator DIR] [--quick] [--json]

`fraction_of_possible_speedup`: the speed-up of speculative over plain decoding as measured in the
loop, over what acceptance length and costs allow, AL·t_plain ÷ (K·t_draft + t_verify), the three
costs timed outside the loop (promise: at least 0.85). `plain_over_transformers`: plain decoding's
tokens per second over `transformers.generate`'s (promise: at least 1). Everything takes turns in
one process; both are medians over rounds. Without a speculator a random draft is used: nothing is
accepted then, but the ratio means the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from speculators_core.checkpoint import load_speculator
from speculators_core.config import Eagle3Config, default_aux_layers
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.decode.prompt import chat_ids
from speculators_core.decode.sampling import Sampler
from speculators_core.decode.verify import Verifying
from speculators_core.models.demo import unpack_demo_verifier
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import SamplingParams

QUESTION = "A baker sells 12 loaves in the morning and 9 in the afternoon. How many in 6 days?"
CALLS = 7  # of each cost in a round; their median counts


@dataclass(frozen=True)
class Round:
    """Seconds: per token in the loops, per pass for the costs."""

    plain: float
    speculative: float
    transformers: float
    plain_with_prompt: float
    t_plain: float
    t_verify: float
    t_draft: float
    acceptance_length: float
    k: int

    @property
    def possible(self) -> float:
        return self.acceptance_length * self.t_plain / (self.k * self.t_draft + self.t_verify)

    @property
    def fraction(self) -> float:
        return self.plain / self.speculative / self.possible

    @property
    def over_transformers(self) -> float:
        return self.transformers / self.plain_with_prompt


class Bench:
    def __init__(self, verifier: Verifier, drafter: EagleDrafter, k: int, tokens: int) -> None:
        self.verifier, self.drafter, self.k, self.tokens = verifier, drafter, k, tokens
        self.prompt = chat_ids(verifier.tokenizer, [{"role": "user", "content": QUESTION}])

    def round(self) -> Round:
        plain, plain_with_prompt, _ = self._loop(None)
        generated = self._generate()
        speculative, _, length = self._loop(self.drafter)
        t_plain, t_verify, t_draft = self._costs()
        return Round(
            plain, speculative, generated, plain_with_prompt, t_plain, t_verify, t_draft,
            length, self.k,
        )  # fmt: skip

    def _loop(self, drafter: EagleDrafter | None) -> tuple[float, float, float]:
        """Seconds a token without and with reading the prompt, and the acceptance length."""
        decoder = SpeculativeDecoder(self.verifier, drafter, self.k)
        began = time.perf_counter()
        steps = decoder.generate(self.prompt, SamplingParams(max_tokens=self.tokens), ())
        next(steps)
        read = time.perf_counter()
        rest = list(steps)
        ended = time.perf_counter()
        tokens = sum(step.accepted + 1 for step in rest)  # a last step that was cut counts whole
        return (ended - read) / tokens, (ended - began) / self.tokens, tokens / len(rest)

    def _generate(self) -> float:
        ids = torch.tensor([self.prompt])
        began = time.perf_counter()
        self.verifier.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            min_new_tokens=self.tokens,
            do_sample=False,
        )
        return (time.perf_counter() - began) / self.tokens

    @torch.inference_mode()
    def _costs(self) -> tuple[float, float, float]:
        """One plain pass, one pass over K+1 tokens, one draft step, half-way through an answer."""
        layers = self.drafter.aux_layers
        sampler = Sampler(SamplingParams())
        context = self.prompt + self.prompt[: self.tokens // 2]
        with self.verifier.watching(layers) as seen:
            verifying = Verifying(self.verifier, len(context) + self.k + 2, seen, layers)
            drafting = self.drafter.begin(context[0], len(context) + self.k + 2, sampler)
            verifying.read(context[:-1], logits_of=1)
            drafting.absorb(context[1:], verifying.keep(len(context) - 1))
            drafted = tuple(context[: self.k])
            verifying.read(context[-1:], logits_of=1)
            aux = torch.cat([seen[layer] for layer in layers], dim=-1)

            def plain() -> None:
                sampler.judge(verifying.read(context[-1:], logits_of=1), (), None)

            def verify() -> None:
                logits = verifying.read([context[-1], *drafted], logits_of=self.k + 1)
                sampler.judge(logits, drafted, None)

            def draft() -> None:
                drafting.absorb(context[-1:], aux)
                drafting.propose(1)
                drafting.store.advance(-1)

            return seconds(plain), seconds(verify), seconds(draft)


def seconds(call: Callable[[], None]) -> float:
    """The median time of a call, once warm."""
    call()
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def random_draft(verifier: Verifier) -> Eagle3Draft:
    """A draft of the usual shape for this verifier: one layer of its width, 8192 tokens."""
    facts = verifier.facts
    config = Eagle3Config.model_validate(
        {
            "draft_vocab_size": min(8192, facts.vocab_size),
            "norm_before_residual": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": list(default_aux_layers(facts.num_hidden_layers)),
            "dtype": "float32",
            "speculators_config": {
                "proposal_methods": [{"speculative_tokens": 3}],
                "verifier": {"name_or_path": facts.path, "architectures": facts.architectures},
            },
            "transformer_layer_config": {
                "num_hidden_layers": 1,
                **{name: getattr(facts, name) for name in _SAME},
            },
        }
    )
    torch.manual_seed(0)
    return Eagle3Draft(config).eval().requires_grad_(False)


_SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


def demo_verifier() -> Path:
    """The demo verifier under SPECLAB_HOME, unpacked where it is absent."""
    home = Path(os.environ.get("SPECLAB_HOME", "~/.speclab")).expanduser()
    directory = home / "verifiers" / "smollm2-135m-instruct"
    return directory if directory.exists() else unpack_demo_verifier(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/decode.py")
    parser.add_argument("--verifier", type=Path, help="default: the demo verifier")
    parser.add_argument("--speculator", type=Path, help="default: a random draft")
    parser.add_argument("--speculative-tokens", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="within a minute on two cores")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    chosen = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    verifier = load_verifier(chosen.verifier or demo_verifier())
    draft = (
        load_speculator(chosen.speculator, embedding=verifier.embedding, dtype=torch.float32)
        if chosen.speculator
        else random_draft(verifier)
    )
    drafter = EagleDrafter(draft, verifier)
    k = chosen.speculative_tokens
    Bench(verifier, drafter, k, tokens=4).round()  # warm
    bench = Bench(verifier, drafter, k, tokens=24 if chosen.quick else 64)
    rounds = [bench.round() for _ in range(3 if chosen.quick else 7)]
    result = summary(rounds, "given" if chosen.speculator else "random")
    for name, value in result.items():
        print(f"{name}: {value}")
    if chosen.json:
        print(json.dumps(result))


def summary(rounds: list[Round], speculator: str) -> dict[str, float | int | str]:
    def median(of: Callable[[Round], float]) -> float:
        return round(statistics.median(of(one) for one in rounds), 4)

    return {
        "fraction_of_possible_speedup": median(lambda r: r.fraction),
        "plain_over_transformers": median(lambda r: r.over_transformers),
        "speedup": median(lambda r: r.plain / r.speculative),
        "possible_speedup": median(lambda r: r.possible),
        "acceptance_length": median(lambda r: r.acceptance_length),
        "plain_tokens_per_second": median(lambda r: 1 / r.plain),
        "t_plain_ms": median(lambda r: 1000 * r.t_plain),
        "t_verify_ms": median(lambda r: 1000 * r.t_verify),
        "t_draft_ms": median(lambda r: 1000 * r.t_draft),
        "speculative_tokens": rounds[0].k,
        "speculator": speculator,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
