"""Equal to speculators 0.9.0: what it loads from us, and what it converts beside us.

The real package is imported here, and nowhere in the product.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from speculators_core.checkpoint import load_speculator, save_speculator
from speculators_core.conversion.convert import convert
from speculators_core.params import ConvertParams
from tests import tiny

speculators = pytest.importorskip(
    "speculators", reason="speculators 0.9.0 is not installed: pip install speculators==0.9.0"
)

from loguru import logger  # noqa: E402
from speculators import SpeculatorModel  # noqa: E402
from speculators.convert import convert_model  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402

logger.remove()
logging.getLogger("transformers").setLevel(logging.ERROR)

LENGTH, STEPS = 10, 3
NORMS = [
    {"norm_before_residual": False, "norm_output": False},
    {"norm_before_residual": True, "norm_output": False},
    {"norm_before_residual": False, "norm_output": True},
    {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
]


def ttt_attention(cache):
    """Attention over the unrolled steps: the first block causal, later ones only oneself."""

    def attend(layer, q, k, v):
        keys, values = cache.setdefault(layer, ([], []))
        keys.append(k)
        values.append(v)
        own = torch.eye(LENGTH, dtype=torch.bool)
        mask = torch.cat([own.tril() | torch.ones_like(own).tril()] + [own] * (len(keys) - 1), -1)
        return scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, enable_gqa=True
        )

    return attend


@torch.no_grad()
def our_logits(draft, aux, tokens):
    attend, hidden, out = ttt_attention({}), draft.combine(aux), []
    for step in range(STEPS):
        fed = torch.cat([tokens[:, step:], torch.zeros(1, step, dtype=torch.int64)], -1)
        positions = 1 + step + torch.arange(LENGTH)[None]
        normed, hidden = draft.step(fed, hidden, positions, attend)
        out.append(draft.logits(normed))
    return torch.stack(out)


@torch.no_grad()
def their_logits(directory, aux, tokens, embedding=None):
    """`embedding` for a file that carries none: speculators 0.9.0 then leaves its table
    uninitialised and takes the verifier's only where that memory happens to hold NaN."""
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(directory, config=config).float().eval()
    if embedding is not None:
        model.embed_tokens.weight.data = embedding.float()
    out = []
    model.lm_head.register_forward_hook(lambda _m, _i, logits: out.append(logits.clone()))
    model(aux, tokens, document_ids=torch.zeros_like(tokens), ttt_steps=STEPS)
    return torch.stack(out)


def inputs():
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(1, LENGTH, 3 * tiny.HIDDEN, generator=generator)
    return aux, torch.randint(0, tiny.VOCAB, (1, LENGTH), generator=generator)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("norms", NORMS, ids=lambda n: "+".join(k for k, v in n.items() if v))
def test_a_draft_saved_here_gives_the_same_logits_there(tmp_path, tiny_verifier, norms, layers):
    config = tiny.draft_config(tiny_verifier, layers=layers, **norms)
    directory = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    ours = our_logits(load_speculator(directory), *inputs())
    theirs = their_logits(directory, *inputs())
    assert ours.shape == (STEPS, 1, LENGTH, tiny.DRAFT_VOCAB)
    assert (ours - theirs).abs().max() < 1e-4


def test_the_generic_loader_takes_it_with_its_map_and_head(tiny_speculator):
    theirs = SpeculatorModel.from_pretrained(str(tiny_speculator))
    assert isinstance(theirs, Eagle3DraftModel)
    ours = load_speculator(tiny_speculator).state_dict()
    for name in ours:
        assert torch.equal(theirs.state_dict()[name], ours[name]), name


def test_a_whole_vocabulary_head_arrives_untied(tmp_path, tiny_verifier):
    config = tiny.draft_config(tiny_verifier, draft_vocab=tiny.VOCAB)
    directory = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    theirs = SpeculatorModel.from_pretrained(str(directory))
    assert torch.equal(theirs.lm_head.weight, load_speculator(directory).lm_head.weight)


RESEARCH = {
    "pickle": {},
    "safetensors": {"safetensors": True},
    "layers.0": {"prefix": "layers.0."},
    "own embedding": {"embedding": True},
    "whole vocabulary": {"draft_vocab": tiny.VOCAB},
    "no dtype": {"config_changes": {"torch_dtype": None}},
    "bfloat16": {"config_changes": {"torch_dtype": "bfloat16"}},
}


@pytest.mark.parametrize("variant", RESEARCH.values(), ids=RESEARCH.keys())
def test_a_research_checkpoint_becomes_what_their_converter_writes(
    tmp_path, tiny_verifier, variant
):
    research = tiny.build_research(tmp_path / "research", tiny_verifier, **variant)
    convert_model(str(research), str(tiny_verifier), "eagle3", output_path=str(tmp_path / "theirs"))
    convert(params(research, tiny_verifier), tmp_path / "ours")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert_equal_configs(tmp_path / "ours", tmp_path / "theirs")


def params(research, verifier, **more):
    return ConvertParams(
        checkpoint=str(research), verifier=str(verifier), validate_on_verifier=False, **more
    )


# where ours says more, and where theirs carries what has no meaning for a draft
OURS_DIFFERS = {"architectures", "transformers_version", "auto_map"}
THEIR_DEFAULTS = {
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
    *("initializer_range", "pretraining_tp", "use_cache", "tie_word_embeddings"),
}


def assert_equal_configs(ours, theirs):
    ours, theirs = (json.loads((d / "config.json").read_text()) for d in (ours, theirs))
    our_layer, their_layer = (c.pop("transformer_layer_config") for c in (ours, theirs))
    given = {name: value for name, value in theirs.items() if value is not None}
    assert {n: v for n, v in ours.items() if n not in OURS_DIFFERS} == {
        n: v for n, v in given.items() if n not in OURS_DIFFERS
    }
    assert our_layer == {n: v for n, v in their_layer.items() if n not in THEIR_DEFAULTS}


def test_both_conversions_give_the_same_logits_there(tmp_path, tiny_verifier):
    research = tiny.build_research(tmp_path / "research", tiny_verifier)
    convert_model(
        str(research), str(tiny_verifier), "eagle3", output_path=str(tmp_path / "theirs"),
        eagle_aux_hidden_state_layer_ids=list(tiny.AUX_LAYERS),
    )  # fmt: skip
    convert(params(research, tiny_verifier, aux_layers=tiny.AUX_LAYERS), tmp_path / "ours")
    table = tiny.embedding_of(tiny_verifier).half()  # as they load it into a half precision draft
    ours, theirs = (their_logits(tmp_path / d, *inputs(), table) for d in ("ours", "theirs"))
    assert torch.equal(ours, theirs)
    here = load_speculator(tmp_path / "ours", embedding=table, dtype=torch.float32)
    assert (our_logits(here, *inputs()) - ours).abs().max() < 1e-4


def test_their_config_class_takes_our_file_whole(tmp_path, tiny_verifier):
    research = tiny.build_research(tmp_path / "research", tiny_verifier)
    convert(params(research, tiny_verifier, speculative_tokens=5), tmp_path / "ours")
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "ours")
    assert config.norm_before_residual is False
    assert config.eagle_aux_hidden_state_layer_ids is None
    assert config.draft_vocab_size == tiny.DRAFT_VOCAB
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 5
    assert config.transformer_layer_config.head_dim == tiny.HEAD_DIM
    assert config.transformer_layer_config.rope_parameters["rope_theta"] == tiny.ROPE_THETA


def test_a_draft_of_theirs_is_read_here(tmp_path, tiny_speculator):
    config = Eagle3SpeculatorConfig.from_pretrained(tiny_speculator)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(tiny_speculator, config=config)
    theirs.save_pretrained(tmp_path / "theirs")
    draft = load_speculator(tmp_path / "theirs")
    save_speculator(draft, tmp_path / "again")
    for name, tensor in load_speculator(tiny_speculator).state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name
