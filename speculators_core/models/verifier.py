"""The verifier in-process: a `transformers` causal LM whose inner states can be seen.

States are named "after k layers": 0 is the embedding output, k the output of layer k-1, n the
state before the final norm. That is what EAGLE, speculators and vLLM feed to a draft.

Families differ in what they call their layers and final norm, in what they do to the product of
the head (`logit_rule`), and in where a multimodal wrapper keeps its language model. Sliding windows
and other masks are `transformers`' own. What can't be computed exactly is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_log

from speculators_core import digests
from speculators_core.config import read_json
from speculators_core.errors import CheckpointError, PairingError
from speculators_core.models.logit_rule import LogitRule, rule_of
from speculators_core.models.stops import stops_of
from speculators_core.models.verifier_config import VerifierFacts, read_verifier

_TEXT_MODEL = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}  # how multimodal wrappers call the weights of their language model
_LAYERS = ("layers", "h")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "norm_f", "ln_f")
_HEAD_TOLERANCE = 0.02  # of the largest logit: rounding of bfloat16 stays well below
_EXACT_TOLERANCE = 1e-3  # the same in float32


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
        return stops_of(self.model.generation_config, self.tokenizer)

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

    @cached_property
    def stack(self) -> nn.Module:
        """Embedding, layers and final norm: the model without its head (and its eyes)."""
        found = _text_stack(self.model)
        assert found is not None, "looked at when it was loaded"
        return found

    @property
    def final_norm(self) -> nn.Module:
        """Applied to the state after n layers before `lm_head`."""
        norm = _named(self.stack, _NORMS)
        assert norm is not None
        return norm

    @property
    def layers(self) -> nn.ModuleList:
        """Empty where only the ends of the model were loaded."""
        layers = _named(self.stack, _LAYERS)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @cached_property
    def logit_rule(self) -> LogitRule:
        """What the family does to the product of its head."""
        return rule_of(self.model.config.get_text_config())

    def logits(self, final: Tensor) -> Tensor:
        """[.., V]: the verifier's own logits from its states [.., H] after the last layer."""
        return self.logit_rule(self.final_norm(final) @ self.lm_head.T)

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
            self.stack(ids, use_cache=False)
        for k, state in seen.items():
            if state.shape != (*ids.shape, self.facts.hidden_size):
                raise PairingError(
                    f"{type(self.model).__name__} has states of shape {list(state.shape)} after "
                    f"{k} layers, expected {[*ids.shape, self.facts.hidden_size]}",
                    where=self.facts.path,
                    hint="EAGLE-3 needs one state of the hidden size a token",
                )
        return dict(seen)

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `PairingError` unless `logits` of the last state are the model's own: a family
        may do something to them that `logit_rule` does not know, and a draft would learn it
        wrong."""
        last = len(self.layers)
        ids = torch.arange(min(8, self.facts.vocab_size), device=self.device)[None]
        with self.watching([last]) as seen:
            shown = self.model(ids, use_cache=False).logits.float()
        ours = self.logits(seen[last]).float()
        exact = self.model.dtype == torch.float32
        furthest = float((shown - ours).abs().max())
        if furthest > (_EXACT_TOLERANCE if exact else _HEAD_TOLERANCE) * float(ours.abs().max()):
            raise PairingError(
                f"{type(self.model).__name__} does something to its logits that training does not "
                f"know: they differ from its head's by up to {furthest:.3g}",
                where=self.facts.path,
                hint="known are scaled logits (Cohere, Granite, Falcon-H1) and capped ones (Gemma)",
            )

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.facts)


def fingerprint_of(facts: VerifierFacts) -> str:
    """Differs where config, weights or tokenizer do: a hash of all their bytes. Those of large
    weight files are read once, and again when the file changes (`digests`)."""
    directory = Path(facts.path)
    digest = hashlib.sha256((facts.tokenizer_fingerprint or "").encode())
    digest.update((directory / "config.json").read_bytes())
    for file in sorted((*directory.glob("*.safetensors"), *directory.glob("*.bin"))):
        digest.update(f"{file.name}:{digests.of_file(file)}".encode())
    return digest.hexdigest()


def fastest() -> tuple[torch.device, torch.dtype]:
    """Where this machine computes a verifier, and the precision that is fast there: a GPU in
    bfloat16, else the CPU in float32."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def load_verifier(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ends_only: bool = False,
) -> Verifier:
    """Load a model directory; of a multimodal wrapper, its language model. No code from the
    directory is run, no hub is asked. A quantised model is run as it is.

    `ends_only` leaves the layers out: embedding, final norm and head are all that training needs
    when the states come from elsewhere. Raises `CheckpointError` where weights are missing, which
    would otherwise be random, and for models that can't be run or watched here, by their name.
    """
    facts = read_verifier(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(facts.path, local_files_only=True)
        model, missing = _load(facts, dtype, ends_only)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise _not_loaded(facts, error) from error
    if missing:
        raise CheckpointError(
            f"the verifier's weights lack {missing[0]} ({len(missing)} in all are missing)",
            where=facts.path,
            hint="is the download complete? are the names those of a causal language model?",
        )
    verifier = Verifier(model.to(device).eval().requires_grad_(False), tokenizer, facts)
    _check_watchable(verifier)
    return verifier


def _load(
    facts: VerifierFacts, dtype: torch.dtype, ends_only: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of weights that it lacks."""
    config = AutoConfig.from_pretrained(facts.path, local_files_only=True)
    inner = read_json(Path(facts.path) / "config.json").get("text_config")
    kind: Any = AutoModelForCausalLM
    mapping: dict[str, Any] = {}
    if isinstance(inner, dict) and inner.get("model_type"):
        text = config.get_text_config()
        if type(text) in AutoModelForCausalLM._model_mapping:
            text.tie_word_embeddings = inner.get("tie_word_embeddings", config.tie_word_embeddings)
            config, mapping = text, {"key_mapping": _TEXT_MODEL}
        else:  # a language model that can't stand alone: the wrapper, whose eyes stay shut
            kind = AutoModelForImageTextToText
    options: dict[str, Any] = {**mapping}
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # sdpa leaves the cap out, without a word
    with _without_layers(text) if ends_only else nullcontext():
        model, found = kind.from_pretrained(
            facts.path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    return model, sorted(found["missing_keys"])


@contextmanager
def _without_layers(text: Any) -> Iterator[None]:
    """A config of no layers; that their weights are not wanted need not be told."""
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    before = transformers_log.get_verbosity()
    transformers_log.set_verbosity_error()
    try:
        yield
    finally:
        transformers_log.set_verbosity(before)


def _not_loaded(facts: VerifierFacts, error: Exception) -> CheckpointError:
    said = str(error).strip().splitlines()[0]
    if facts.quantization:
        return CheckpointError(
            f"the verifier is quantised with {facts.quantization}, which can't be run here: {said}",
            where=facts.path,
            hint="install what transformers asks for, or use the model that was quantised",
        )
    return CheckpointError(
        f"the verifier can't be loaded: {said}",
        where=facts.path,
        hint="it needs config.json, weights in safetensors and a tokenizer",
    )


def _check_watchable(verifier: Verifier) -> None:
    """Raise unless layers, final norm and a head of plain numbers can be found."""
    name, where = type(verifier.model).__name__, verifier.facts.path
    if _text_stack(verifier.model) is None:
        raise CheckpointError(
            f"{name} does not show its layers and final norm",
            where=where,
            hint="EAGLE-3 needs a decoder-only model",
        )
    head = verifier.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        how = verifier.facts.quantization or "something that is not a matrix of numbers"
        raise CheckpointError(
            f"the head of {name} is quantised with {how}: a draft's targets need its rows",
            where=where,
            hint="use a model whose lm_head was left alone",
        )


def _text_stack(model: PreTrainedModel) -> nn.Module | None:
    """The module that holds both layers and final norm; a wrapper's language model first."""
    candidates = (model.get_decoder(), *model.modules())
    fits = (m for m in candidates if _named(m, _NORMS) is not None)
    return next((m for m in fits if isinstance(_named(m, _LAYERS), nn.ModuleList)), None)


def _named(module: nn.Module | None, names: Sequence[str]) -> nn.Module | None:
    children = dict(module.named_children()) if module is not None else {}
    return next((children[name] for name in names if children.get(name) is not None), None)
