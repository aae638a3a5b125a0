"""Equal to speculators 0.9.0: what it loads from us, and what it converts beside us.

The real package is imported here, and nowhere in the product.
"""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from speculators_core.checkpoint import load_speculator, save_speculator
from speculators_core.conversion.convert import convert
from speculators_core.params import ConvertParams
from tests import tiny
from tests.core import layouts
from tests.core.layouts import AFTER, OUTPUT, Shape

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


def shapes(count, **fixed):
    """`count` different drafts: sizes, heads, layers, precision and map vary with the number."""
    for i in range(count):
        rng = random.Random(i)
        heads = rng.choice([2, 4])
        yield Shape(
            **{
                "hidden": (hidden := rng.choice([16, 32, 48])),
                "wide": hidden,
                "heads": heads,
                "kv_heads": rng.choice([1, heads // 2, heads]),
                "head_dim": rng.choice([8, 16]),
                "inner": rng.choice([24, 64]),
                "vocab": 96,
                "draft_vocab": rng.choice([16, 40, 96]),
                "dtype": ("float32", "float16", "bfloat16")[i % 3],
                "rope_theta": rng.choice([1e4, 5e5, 1e6]),
                "context": rng.choice([128, 512]),
                **fixed,
            }
        )


def converted_by_both(tmp_path, source, shape, **how):
    """The directories that they and we make of one checkpoint; the ids as they must be told."""
    verifier = layouts.verifier(tmp_path / "v", shape)
    ids = how.pop("ids", None)
    told = {"eagle_aux_hidden_state_layer_ids": ids} if ids else {}
    convert_model(
        str(source), str(verifier), "eagle3", output_path=str(tmp_path / "theirs"), **told
    )
    convert(params(source, verifier, **how), tmp_path / "ours")
    return tmp_path / "ours", tmp_path / "theirs"


def assert_equal_tensors(ours, theirs):
    ours, theirs = (load_file(d / "model.safetensors") for d in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def sweep_converted(
    tmp_path, make, count=20, *, fixed=None, embedding=None, form="safetensors", **how
):
    """Convert `count` checkpoints of one layout with both, and compare tensors and config."""
    ids = how.get("ids")
    for i, shape in enumerate(shapes(count, **(fixed or {}))):
        carried = bool(i % 2) if embedding is None else embedding
        draft = layouts.weights(shape, i, embedding=carried)
        place = tmp_path / str(i)
        source = make(place / "source", shape, draft, form=form, **how)
        both = converted_by_both(place, source, shape, ids=[k + 1 for k in ids] if ids else None)
        assert_equal_tensors(*both)
        assert_equal_configs(*both)


def test_twenty_research_checkpoints_become_what_their_converter_writes(tmp_path):
    sweep_converted(tmp_path / "midlayer", layouts.research)
    sweep_converted(tmp_path / "layers", layouts.research, count=3, prefix="layers.0.")
    sweep_converted(tmp_path / "bin", layouts.research, count=1, form="bin")


def test_twenty_specforge_exports_become_what_their_converter_writes(tmp_path):
    """Told the aux layers, which it does not look for, and without `fc_norm`, which it drops."""
    sweep_converted(tmp_path, layouts.specforge, ids=OUTPUT)


def test_twenty_angelslim_drafts_become_what_their_converter_writes(tmp_path):
    sweep_converted(tmp_path, layouts.angelslim, ids=OUTPUT, embedding=True)


def test_twenty_model_optimizer_exports_become_what_their_converter_writes(tmp_path):
    """With a whole vocabulary: of a reduced one it drops the map. YaRN on every one."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    fixed = {"draft_vocab": 96}
    sweep_converted(tmp_path, layouts.model_optimizer, fixed=fixed, ids=OUTPUT, rope_scaling=yarn)


@pytest.mark.parametrize("version", ["0.1.0.dev14", "0.3.0", "0.5.0", "0.9.0"])
def test_twenty_drafts_of_a_version_load_there_as_their_conversions_do(tmp_path, version):
    for i, shape in enumerate(shapes(20)):
        shape = replace(shape, layers=1 + i % 3)
        verifier = layouts.verifier(tmp_path / f"v{i}", shape, ends=True)
        source = layouts.speculators(
            tmp_path / f"s{i}",
            shape,
            layouts.weights(shape, i, embedding=True),
            version=version,
            ids=AFTER,
            name=str(verifier),
            norm_before_residual=i % 2 == 0,
        )
        convert(params(source, verifier, aux_layers=tuple(AFTER)), tmp_path / f"o{i}")
        assert_load_alike(tmp_path / f"o{i}", source)


def test_twenty_files_made_for_vllm_load_there_as_their_conversions_do(tmp_path):
    """With a whole vocabulary: a missing `t2d` they take from uninitialised memory. And without
    the nulls that it copies from an export, which their loader refuses.
    """
    for i, shape in enumerate(shapes(20, draft_vocab=96)):
        verifier = layouts.verifier(tmp_path / f"v{i}", shape, ends=True)
        draft = layouts.weights(shape, i)
        source = layouts.made_for_vllm(
            tmp_path / f"s{i}", shape, draft, name=str(verifier), layer={}
        )
        asked = params(source, verifier, aux_layers=tuple(AFTER), norm_before_residual=True)
        convert(asked, tmp_path / f"o{i}")
        assert_load_alike(tmp_path / f"o{i}", source, without="embed_tokens.weight")


# where speculators 0.9.0 does not convert or load right: the table in docs/conversion.md


def theirs_of(tmp_path, make, shape, draft, **how):
    """Their conversion of one checkpoint: its config and its tensors."""
    source = make(tmp_path / "source", shape, draft, **how)
    verifier = layouts.verifier(tmp_path / "v", shape)
    convert_model(str(source), str(verifier), "eagle3", output_path=str(tmp_path / "theirs"))
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    return config, load_file(tmp_path / "theirs" / "model.safetensors")


@pytest.mark.parametrize("make", [layouts.specforge, layouts.model_optimizer, layouts.angelslim])
def test_they_do_not_look_for_the_ids_of_other_tools(tmp_path, make):
    shape = Shape(draft_vocab=128)
    config, _ = theirs_of(tmp_path, make, shape, layouts.weights(shape), ids=OUTPUT)
    assert config["eagle_aux_hidden_state_layer_ids"] is None


@pytest.mark.parametrize("norm", ["fc_norm", "norm_before_fc"])
def test_they_drop_the_norms_before_fc(tmp_path, norm):
    shape = Shape(**{norm: True})
    draft = layouts.weights(shape)
    config, tensors = theirs_of(tmp_path, layouts.specforge, shape, draft, **{norm: True})
    assert config[norm] is True
    assert not any(name.startswith(("fc_norm", "input_norm")) for name in tensors)


def test_they_drop_a_map_without_its_other_side(tmp_path):
    shape = Shape()
    config, tensors = theirs_of(tmp_path, layouts.model_optimizer, shape, layouts.weights(shape))
    assert config["draft_vocab_size"] < config["transformer_layer_config"]["vocab_size"]
    assert not tensors.keys() & {"d2t", "t2d"}


def test_they_drop_the_layers_of_a_model_prefix(tmp_path):
    shape = Shape()
    draft = layouts.weights(shape)
    _, tensors = theirs_of(tmp_path, layouts.research, shape, draft, prefix="model.layers.0.")
    name = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(tensors[name], draft[name])


def test_they_refuse_the_nulls_that_convert_to_vllm_ckpt_copies(tmp_path):
    shape = Shape()
    verifier = layouts.verifier(tmp_path / "v", shape, ends=True)
    source = layouts.made_for_vllm(
        tmp_path / "s", shape, layouts.weights(shape), name=str(verifier)
    )
    with pytest.raises(Exception, match="expected bool, got NoneType"):
        load_there(source)
    convert(params(source, verifier, aux_layers=tuple(AFTER)), tmp_path / "ours")
    assert load_there(tmp_path / "ours").t2d.sum() == shape.draft_vocab


def test_they_take_a_missing_t2d_from_uninitialised_memory(tmp_path):
    """Which mostly ends in sizes that do not match, and always in another map."""
    shape = Shape()
    draft = layouts.weights(shape, embedding=True)
    del draft["t2d"]
    verifier = layouts.verifier(tmp_path / "v", shape, ends=True)
    source = layouts.speculators(tmp_path / "s", shape, draft, ids=AFTER, name=str(verifier))
    try:
        kept = load_there(source).t2d
    except RuntimeError as error:
        assert "size mismatch" in str(error)
    else:
        ids = torch.arange(shape.draft_vocab) + draft["d2t"]
        assert not (kept.sum() == len(ids) and kept[ids].all())


def assert_load_alike(ours, source, without=None):
    """Their loader makes the same model of our conversion as of the file itself."""
    mine, original = (load_there(d) for d in (ours, source))
    ids = original.config.eagle_aux_hidden_state_layer_ids
    assert mine.config.eagle_aux_hidden_state_layer_ids == (ids or AFTER)
    for name in ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm",
                 "norm_output", "target_hidden_size"):  # fmt: skip
        stated = getattr(original.config, name)
        hidden = original.config.transformer_layer_config.hidden_size
        assert (getattr(mine.config, name) or hidden) == (stated or hidden), name
    layer, theirs = (m.config.transformer_layer_config for m in (mine, original))
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "num_hidden_layers", "rms_norm_eps", "vocab_size", "hidden_act",
                 "max_position_embeddings", "rope_parameters"):  # fmt: skip
        assert getattr(layer, name) == getattr(theirs, name), name
    tensors = original.state_dict()
    assert mine.state_dict().keys() == tensors.keys()
    saved = {n for n in tensors if not n.startswith("verifier_")} - {without}
    for name in saved:
        assert torch.equal(mine.state_dict()[name], tensors[name]), name


def load_there(directory):
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(directory, config=config)


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
    research = tiny.build_research(tmp_path / "research", tiny_verifier, safetensors=True)
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
    research = tiny.build_research(tmp_path / "research", tiny_verifier, safetensors=True)
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
