"""The verifier in-process: a `transformers` causal LM whose inner states can be seen.

States are named "after k layers": 0 is the embedding output, k the output of layer k-1, n the
state before the final norm. That is what EAGLE, speculators and vLLM feed to a draft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from speculators_core.config import read_json
from speculators_core.errors import CheckpointError, PairingError
from speculators_core.models.verifier_config import VerifierFacts, read_verifier

_TEXT_MODEL = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}  # how multimodal wrappers call the weights of their language model
_HEAD_TOLERANCE = 0.02  # of the largest logit: rounding of bfloat16 stays well below


@dataclass(frozen=True)
class Verifier:
    """A loaded verifier in eval mode, with its tokenizer and facts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: VerifierFacts

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer by the verifier's own word."""
        named = self.model.generation_config.eos_token_id
        ids = named if isinstance(named, list) else [named]
        ids = [*ids, self.tokenizer.eos_token_id]
        return tuple({int(i): None for i in ids if i is not None})

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        table: Tensor = self.model.get_input_embeddings().weight
        return table

    @property
    def lm_head(self) -> Tensor:
        """[V, H]; the embedding where the two are tied."""
        head: Tensor = self.model.get_output_embeddings().weight
        return head

    @property
    def final_norm(self) -> nn.Module:
        """Applied to the state after n layers before `lm_head`."""
        norm: nn.Module = self.model.base_model.norm
        return norm

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.base_model.layers
        return layers

    @contextmanager
    def watching(self, after_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """While open, each forward pass puts its states [B, S, H] after k layers into the dict."""
        seen: dict[int, Tensor] = {}
        n = len(self.layers)
        wrong = [k for k in after_layers if not 0 <= k <= n]
        if wrong:
            raise PairingError(
                f"aux layer {wrong[0]} is out of range: the verifier has {n} layers (0..{n})",
                where="eagle_aux_hidden_state_layer_ids",
                hint="name the layers the draft was trained on: --aux-layers",
            )

        def watcher(k: int) -> Any:
            def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[k] = args[0] if args else kwargs["hidden_states"]

            return keep

        handles = [
            (self.layers[k] if k < n else self.final_norm).register_forward_pre_hook(
                watcher(k), with_kwargs=True
            )
            for k in set(after_layers)
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def states(self, ids: Tensor, after_layers: Sequence[int]) -> dict[int, Tensor]:
        """States [B, S, H] of whole rows of tokens [B, S] (padding behind is harmless)."""
        with self.watching(after_layers) as seen:
            self.model.base_model(ids, use_cache=False)
        return dict(seen)

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `PairingError` unless the logits are `lm_head` times the normed last state: some
        models scale or cap them, and a draft trained on the bare product would be wrong."""
        last = len(self.layers)
        ids = torch.arange(min(8, self.facts.vocab_size), device=self.device)[None]
        with self.watching([last]) as seen:
            shown = self.model(ids, use_cache=False).logits.float()
        product = (self.final_norm(seen[last]) @ self.lm_head.T).float()
        furthest = float((shown - product).abs().max())
        if furthest > _HEAD_TOLERANCE * float(product.abs().max()):
            raise PairingError(
                f"the verifier's logits differ from its head's by up to {furthest:.3g}",
                where=self.facts.path,
                hint="scaled or capped logits are not supported in training yet",
            )

    @cached_property
    def fingerprint(self) -> str:
        """Differs where config, weights or tokenizer do: a hash of the config, of 16 blocks of
        each weight file and of the tokenizer. A sample, because weights may be 100 GB."""
        directory = Path(self.facts.path)
        digest = hashlib.sha256((self.facts.tokenizer_fingerprint or "").encode())
        digest.update((directory / "config.json").read_bytes())
        for file in sorted(directory.glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as weights:
                for block in range(16):
                    weights.seek(size * block // 16)
                    digest.update(weights.read(1 << 16))
        return digest.hexdigest()


def fastest() -> tuple[torch.device, torch.dtype]:
    """Where this machine computes a verifier, and the precision that is fast there: a GPU in
    bfloat16, else the CPU in float32."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def load_verifier(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Verifier:
    """Load a model directory; of a multimodal wrapper, its language model. No code from the
    directory is run, no hub is asked. Raises `CheckpointError` where weights are missing, which
    would otherwise be random.
    """
    facts = read_verifier(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(facts.path, local_files_only=True)
        model, found = AutoModelForCausalLM.from_pretrained(
            facts.path,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            **_text_model(facts.path),
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the verifier can't be loaded: {str(error).splitlines()[0]}",
            where=facts.path,
            hint="it needs config.json, weights in safetensors and a tokenizer",
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"the verifier's weights lack {missing[0]} ({len(missing)} in all are missing)",
            where=facts.path,
            hint="is the download complete? are the names those of a causal language model?",
        )
    base = model.base_model
    if not hasattr(base, "layers") or not hasattr(base, "norm"):
        raise CheckpointError(
            f"{type(model).__name__} does not show its layers and final norm",
            where=facts.path,
            hint="EAGLE-3 needs a decoder-only model of the Llama shape",
        )
    return Verifier(model.to(device).eval().requires_grad_(False), tokenizer, facts)


def _text_model(path: str) -> dict[str, Any]:
    """What loads the language model of a multimodal wrapper; nothing for an ordinary model."""
    inner = read_json(Path(path) / "config.json").get("text_config")
    if not isinstance(inner, dict) or not inner.get("model_type"):
        return {}
    return {"config": AutoConfig.for_model(**inner), "key_mapping": _TEXT_MODEL}
