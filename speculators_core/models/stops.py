"""The tokens by which a verifier ends an answer: one rule for masks, writing and decoding."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from speculators_core.errors import CheckpointError


def stops_of(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the generation config names, then the tokenizer's end of text."""
    named = generation.eos_token_id
    ids: Sequence[int | None] = named if isinstance(named, list) else [named]
    return tuple({int(i): None for i in (*ids, tokenizer.eos_token_id) if i is not None})


def generation_of(directory: str) -> GenerationConfig:
    """As `transformers` and vLLM have it: generation_config.json, else what config.json implies."""
    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:  # there is none
        return GenerationConfig.from_pretrained(
            directory, "config.json", _from_model_config=True, local_files_only=True
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"generation_config.json should be an object of settings: {error}",
            where=f"{directory}/generation_config.json",
            hint="copy or download it again, or delete it: config.json then counts",
        ) from error
