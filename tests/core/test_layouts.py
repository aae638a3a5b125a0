"""Every EAGLE-3 layout is told by its content, read to the same draft, and asked about what it
leaves open. No verifier is loaded here: its config is enough.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from speculators_core.checkpoint import load_speculator
from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect, recognise
from speculators_core.conversion.source import open_source
from speculators_core.errors import CheckpointError
from speculators_core.params import ConvertParams
from tests.core import layouts
from tests.core.layouts import AFTER, OUTPUT, Shape
from tests.core.layouts.logits import inputs, logits

SHAPE = Shape()
DRAFT = layouts.weights(SHAPE, embedding=True)
BARE = {name: tensor for name, tensor in DRAFT.items() if name != "embed_tokens.weight"}
VERSIONS = ("0.1.0.dev14", "0.3.0", "0.5.0", "0.9.0")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return layouts.verifier(tmp_path_factory.mktemp("layouts") / "verifier", SHAPE)


def params(checkpoint, verifier, **more):
    more.setdefault("validate_on_verifier", False)
    return ConvertParams(checkpoint=str(checkpoint), verifier=str(verifier), **more)


def plan_of(checkpoint, verifier, **more):
    """The plan of a checkpoint; nothing is written."""
    from speculators_core.models.verifier_config import read_verifier

    source = open_source(checkpoint)
    facts = read_verifier(verifier)
    return recognise(source).plan(source, facts, params(checkpoint, verifier, **more))


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


SIX = {
    "eagle3-research": (layouts.research, {}),
    "eagle3-specforge": (layouts.specforge, {"ids": OUTPUT}),
    "eagle3-model-optimizer": (layouts.model_optimizer, {"ids": OUTPUT}),
    "eagle3-angelslim": (layouts.angelslim, {"ids": OUTPUT}),
    "made for vLLM": (layouts.made_for_vllm, {}),
    "speculators": (layouts.speculators, {"ids": AFTER}),
}


@pytest.mark.parametrize("layout", SIX)
def test_the_content_tells_the_layout_whatever_the_folder_is_called(tmp_path, verifier, layout):
    make, how = SIX[layout]
    found = inspect(make(tmp_path / "my_head_v2", SHAPE, DRAFT, **how), verifier)
    assert found.layout == ("speculators" if layout == "made for vLLM" else layout)
    sources = {row.source for row in found.tensors} - {None}
    assert sources == set(open_source(tmp_path / "my_head_v2").tensors)


def test_the_same_weights_in_six_layouts_give_the_same_draft_logits(tmp_path, verifier):
    drafts = {}
    for layout, (make, how) in SIX.items():
        draft = layouts.by_frequency(DRAFT) if "optimizer" in layout else DRAFT
        source = make(tmp_path / layout, SHAPE, draft, **how)
        asked = params(source, verifier, aux_layers=tuple(AFTER), norm_before_residual=False)
        convert(asked, tmp_path / f"{layout} converted")
        table = DRAFT["embed_tokens.weight"]
        drafts[layout] = load_speculator(tmp_path / f"{layout} converted", embedding=table)
    wanted = [logits(drafts["speculators"], *inputs(SHAPE, seed)) for seed in range(4)]
    assert all(w.isfinite().any() for w in wanted)
    for layout, draft in drafts.items():
        for seed, want in enumerate(wanted):
            found = logits(draft, *inputs(SHAPE, seed))
            assert torch.allclose(found, want, rtol=0, atol=1e-5), layout


@pytest.mark.parametrize("form", layouts.FORMS)
def test_every_file_form_gives_the_same_plan(tmp_path, verifier, form):
    want = inspect(layouts.research(tmp_path / "w", SHAPE, BARE, form="safetensors"), verifier)
    found = inspect(layouts.research(tmp_path / "f", SHAPE, BARE, form=form), verifier)
    assert found == want


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_of_the_speculators_format_becomes_todays(tmp_path, verifier, version):
    source = layouts.speculators(tmp_path / "s", SHAPE, DRAFT, version=version, ids=AFTER)
    convert(params(source, verifier), tmp_path / "out")
    found = config_of(tmp_path / "out")
    today = layouts.speculators(tmp_path / "t", SHAPE, DRAFT, ids=AFTER)
    convert(params(today, verifier), tmp_path / "want")
    want = config_of(tmp_path / "want")
    if version == "0.1.0.dev14":  # it had no field for the ids
        del want["eagle_aux_hidden_state_layer_ids"]
    assert found == want


def test_config_variants_import_to_the_same_object(tmp_path, verifier):
    """A15: the RoPE base in three places, ids null, nulls, nested text config, no map needed."""
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    plain = config_of(layouts.research(tmp_path / "plain", SHAPE, BARE))
    variants = {
        "top": {},
        "block": {"rope_theta": None, "rope_parameters": rope},
        "scaling": {"rope_theta": None, "rope_scaling": rope},
        "nested": {**dict.fromkeys(plain), "architectures": ["X"], "text_config": plain},
    }
    found = []
    for name, changes in variants.items():
        source = layouts.research(tmp_path / name, SHAPE, BARE, **changes)
        written = config_of(source) | {"eagle_aux_hidden_state_layer_ids": None, "use_cache": None}
        (source / "config.json").write_text(json.dumps(written))
        found.append(plan_of(source, verifier).config)
    assert all(config == found[0] for config in found)


# which states the draft sees


@pytest.mark.parametrize(
    ("make", "ids", "written", "open_"),
    [
        (layouts.specforge, OUTPUT, AFTER, False),  # its own default
        (layouts.specforge, [1, 5, 6], [2, 6, 7], False),  # starts with 1: outputs, as it says
        (layouts.specforge, AFTER, None, True),  # someone corrected it for vLLM?
        (layouts.specforge, [2, 5, 6], None, True),  # starts with 2: against the layout's word
        (layouts.specforge, [3, 5, 8], [3, 5, 8], False),  # 8 of 8 exists only as a state after
        (layouts.model_optimizer, OUTPUT, AFTER, False),
        (layouts.model_optimizer, [0, 3, 6], [1, 4, 7], False),
        (layouts.model_optimizer, AFTER, None, True),
        (layouts.angelslim, OUTPUT, AFTER, False),
        (layouts.angelslim, AFTER, None, True),
        (layouts.speculators, AFTER, AFTER, False),
        (layouts.speculators, [1, 5, 6], [1, 5, 6], False),
        (layouts.speculators, OUTPUT, None, True),  # the defaults of those who count outputs
    ],
)
def test_ids_are_read_as_the_evidence_says_or_asked_for(
    tmp_path, verifier, make, ids, written, open_
):
    plan = plan_of(make(tmp_path / "s", SHAPE, DRAFT, ids=ids), verifier)
    assert plan.config.eagle_aux_hidden_state_layer_ids == written
    doubts = [d for d in plan.inspection.doubts if d.about == "aux layers"]
    assert any(d.chosen is None for d in doubts) == open_
    for doubt in doubts:
        assert [c.params["aux_layers"] for c in doubt.choices] == [ids, ids]


@pytest.mark.parametrize(
    ("ids", "written"), [(AFTER, AFTER), (OUTPUT, AFTER), ([1, 5, 6], None), ([2, 5, 6], None)]
)
@pytest.mark.parametrize("nested", [True, False])
def test_a_research_list_that_someone_added_counts_only_where_it_is_a_known_default(
    tmp_path, verifier, ids, written, nested
):
    field = {"eagle_aux_hidden_state_layer_ids": ids}
    changes = {"eagle_config": field} if nested else field
    plan = plan_of(layouts.research(tmp_path / "r", SHAPE, BARE, **changes), verifier)
    assert plan.config.eagle_aux_hidden_state_layer_ids == written
    assert len(plan.inspection.doubts) == 1
    assert (plan.inspection.doubts[0].chosen is None) == (written is None)


def test_angelslims_list_and_one_made_for_vllm_must_agree(tmp_path, verifier):
    for name, after, open_ in (("agree", AFTER, False), ("differ", OUTPUT, True)):
        source = layouts.angelslim(
            tmp_path / name, SHAPE, DRAFT, ids=OUTPUT, eagle_aux_hidden_state_layer_ids=after
        )
        doubts = plan_of(source, verifier).inspection.doubts
        assert any(d.chosen is None for d in doubts) == open_, name


@pytest.mark.parametrize("layout", ["eagle3-research", "eagle3-specforge", "eagle3-angelslim",
                                    "eagle3-model-optimizer", "speculators"])  # fmt: skip
def test_a_draft_without_ids_is_asked_about_and_its_answer_settles_it(tmp_path, verifier, layout):
    """A6"""
    make, _ = SIX[layout]
    source = make(tmp_path / "s", SHAPE, DRAFT)
    (doubt,) = plan_of(source, verifier).inspection.doubts
    assert (doubt.about, doubt.chosen) == ("aux layers", None)
    settled = plan_of(source, verifier, **doubt.choices[0].params)
    assert settled.inspection.doubts == []
    assert settled.config.eagle_aux_hidden_state_layer_ids == AFTER


def test_a_nonsense_list_of_ids_is_refused(tmp_path, verifier):
    for i, ids in enumerate(("2,4,5", [1, "3", 4], [-1, 3, 4], [True, 3, 4])):
        source = layouts.specforge(tmp_path / str(i), SHAPE, BARE, ids=ids)
        with pytest.raises(CheckpointError, match="should be a list of layer ids"):
            plan_of(source, verifier)


# Model-Optimizer


@pytest.mark.parametrize(
    ("switch", "value", "means"),
    [
        ("use_aux_hidden_state", False, "EAGLE-1"),
        ("use_input_layernorm_in_first_layer", False, "embedding is not normed"),
        ("use_last_layernorm", False, "without a final norm"),
        ("use_mtp_layernorm", True, "further norm"),
        ("next_layer_regular", False, "not ordinary"),
        ("parallel_draft_step", 4, "several tokens are drafted at once"),
        ("use_new_thing", True, "not known here"),
    ],
)
def test_a_switch_that_the_target_cannot_express_is_refused_in_words(
    tmp_path, verifier, switch, value, means
):
    source = layouts.model_optimizer(
        tmp_path / "m", SHAPE, BARE, ids=OUTPUT, switches={switch: value}
    )
    with pytest.raises(CheckpointError, match=f"eagle_config.{switch} is {value}.*{means}"):
        plan_of(source, verifier)


def test_latent_attention_is_refused_in_words(tmp_path, verifier):
    draft = {**BARE, "layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 64)}
    source = layouts.model_optimizer(tmp_path / "m", SHAPE, draft, ids=OUTPUT)
    with pytest.raises(CheckpointError, match="multi-head latent attention"):
        plan_of(source, verifier)


def test_a_quantised_draft_is_refused_in_words(tmp_path, verifier):
    draft = {**BARE, "fc.weight": BARE["fc.weight"].to(torch.int8)}
    source = layouts.model_optimizer(tmp_path / "m", SHAPE, draft, ids=OUTPUT)
    with pytest.raises(CheckpointError, match="quantised"):
        plan_of(source, verifier)


def test_yarn_is_kept_and_the_two_norms_are_warned_of(tmp_path, verifier):
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    source = layouts.model_optimizer(tmp_path / "m", SHAPE, BARE, ids=OUTPUT, rope_scaling=yarn)
    plan = plan_of(source, verifier)
    rope = plan.config.transformer_layer_config.rope_parameters
    assert rope == {"rope_theta": 10000.0, **yarn}
    assert any("norms the state twice" in warning for warning in plan.inspection.warnings)


def test_a_vocabulary_in_the_order_of_frequency_keeps_its_order(tmp_path, verifier):
    draft = layouts.by_frequency(BARE)
    assert (torch.arange(32) + draft["d2t"]).diff().lt(0).any()
    convert(params(layouts.model_optimizer(tmp_path / "m", SHAPE, draft, ids=OUTPUT), verifier),
            tmp_path / "out")  # fmt: skip
    found = load_speculator(tmp_path / "out", embedding=DRAFT["embed_tokens.weight"])
    assert torch.equal(found.d2t, draft["d2t"])
    assert torch.equal(found.t2d, BARE["t2d"])
    assert torch.equal(found.lm_head.weight, draft["lm_head.weight"])


def test_a_file_made_for_vllm_is_asked_which_residual_it_means(tmp_path, verifier):
    plan = plan_of(layouts.made_for_vllm(tmp_path / "m", SHAPE, DRAFT), verifier)
    assert [d.about for d in plan.inspection.doubts] == ["norm_before_residual", "aux layers"]
    assert all(d.chosen is None for d in plan.inspection.doubts)
    whole = layouts.speculators(
        tmp_path / "s", SHAPE, DRAFT, version="0.1.0.dev14", norm_before_residual=True
    )
    assert [d.about for d in plan_of(whole, verifier).inspection.doubts] == ["aux layers"]


# SpecForge


def test_specforges_norm_output_is_another_switch(tmp_path, verifier):
    made = {v: layouts.specforge(tmp_path / str(v), SHAPE, BARE, ids=OUTPUT, norm_output=v)
            for v in (True, False)}  # fmt: skip
    plan = plan_of(made[True], verifier)
    assert plan.config.norm_output is False
    (doubt,) = [d for d in plan.inspection.doubts if d.about == "norm_output"]
    assert doubt.chosen == 0
    assert plan_of(made[True], verifier, norm_output=True).config.norm_output is True
    with pytest.raises(CheckpointError, match="without its final norm"):
        plan_of(made[False], verifier)


def test_with_norms_on_the_states_it_is_asked_for(tmp_path, verifier):
    """EAGLE-3.1's pair of switches: SGLang serves it one way, SpecForge trains it another."""
    shape = Shape(fc_norm=True)
    draft = layouts.weights(shape)
    source = layouts.specforge(tmp_path / "s", shape, draft, ids=OUTPUT, norm_output=True)
    plan = plan_of(source, verifier)
    assert plan.config.fc_norm is True
    assert [d.chosen for d in plan.inspection.doubts if d.about == "norm_output"] == [None]
    alone = layouts.specforge(tmp_path / "a", shape, draft, ids=OUTPUT)
    assert [d.about for d in plan_of(alone, verifier).inspection.doubts] == ["aux layers"]


# norms, rotary positions, the rest of a config


@pytest.mark.parametrize("norm", ["norm_before_fc", "fc_norm"])
@pytest.mark.parametrize("make", [layouts.research, layouts.specforge, layouts.speculators])
def test_norms_whose_switch_was_forgotten_are_used(tmp_path, verifier, norm, make):
    """A10: `input_norm` and `fc_norm` weights speak for themselves."""
    shape = Shape(**{norm: True})
    source = make(tmp_path / "s", shape, layouts.weights(shape, embedding=True), **{norm: None})
    assert norm not in config_of(source)
    assert getattr(plan_of(source, verifier).config, norm) is True


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc", "fc_norm",
                                    "norm_output"])  # fmt: skip
def test_every_switch_changes_the_logits_and_survives_conversion(tmp_path, verifier, switch):
    """A10"""
    on = Shape(**{switch: True}) if switch in ("norm_before_fc", "fc_norm") else SHAPE
    draft, found = layouts.weights(on, embedding=True), {}
    plain = {n: t for n, t in draft.items() if not n.startswith(("input_norm", "fc_norm."))}
    for value, shape, weights in ((True, on, draft), (False, SHAPE, plain)):
        source = layouts.speculators(
            tmp_path / f"{value}", shape, weights, ids=AFTER, **{switch: value}
        )
        convert(params(source, verifier), tmp_path / f"{value} out")
        converted, before = (load_speculator(d) for d in (tmp_path / f"{value} out", source))
        found[value] = logits(converted, *inputs(SHAPE))
        assert torch.equal(found[value], logits(before, *inputs(SHAPE)))
    first_two = (found[True] - found[False])[:2].nan_to_num().abs()
    assert first_two.max() > 1e-3


@pytest.mark.parametrize("layout", SIX)
def test_a_missing_rope_base_is_the_verifiers_and_recorded(tmp_path, layout):
    """A17"""
    long = layouts.verifier(tmp_path / "long", SHAPE, rope_theta=1e6)
    make, how = SIX[layout]
    source = make(tmp_path / "s", SHAPE, DRAFT, **how)
    config = config_of(source)
    inner = config.get("transformer_layer_config", config)
    inner.pop("rope_theta", None)
    inner.pop("rope_parameters", None)
    (source / "config.json").write_text(json.dumps(config))
    plan = plan_of(source, long)
    assert plan.config.transformer_layer_config.rope_parameters["rope_theta"] == 1e6
    (doubt,) = [d for d in plan.inspection.doubts if "rope_theta" in d.about]
    assert (doubt.chosen, doubt.choices[1].params) == (0, {"rope_theta": 10000.0})
    other = plan_of(source, long, rope_theta=10000.0)
    assert other.config.transformer_layer_config.rope_parameters["rope_theta"] == 10000.0


def test_the_rope_base_shows_at_position_500(tmp_path):
    """A17"""
    found = []
    for theta in (1e4, 1e6):
        shape = Shape(rope_theta=theta)
        draft = load_speculator(layouts.speculators(tmp_path / f"{theta}", shape, DRAFT, ids=AFTER))
        aux, tokens = inputs(SHAPE)
        far = torch.tensor([[0, 60, 120, 180, 240, 300, 360, 420, 480, 500]])
        normed, _ = draft.step(tokens, draft.combine(aux), far, _causal())
        found.append(draft.logits(normed)[0, -1])
    assert (found[0] - found[1]).abs().max() > 1e-3


def _causal():
    from tests.core.layouts import logits as module

    return module._causal


def test_a_base_that_is_not_the_verifiers_is_warned_of(tmp_path):
    long = layouts.verifier(tmp_path / "long", SHAPE, rope_theta=1e6)
    found = inspect(layouts.research(tmp_path / "r", SHAPE, BARE), long)
    assert any("RoPE base is 10000, its verifier's 1e+06" in w for w in found.warnings)
    assert found.config["rope_parameters"].value["rope_theta"] == 1e4


@pytest.mark.parametrize("theta", ["big", -1, True, float("inf")])
def test_a_base_that_is_no_number_is_refused(tmp_path, verifier, theta):
    with pytest.raises(CheckpointError, match=r"rope_theta should be a (positive )?number"):
        plan_of(layouts.research(tmp_path / "r", SHAPE, BARE, rope_theta=theta), verifier)


def test_a_shorter_context_is_written_longer_and_warned_of(tmp_path, verifier):
    found = inspect(layouts.research(tmp_path / "r", SHAPE, BARE,
                                     max_position_embeddings=64), verifier)  # fmt: skip
    assert found.config["max_position_embeddings"].value == 512
    assert any("made for 64 positions, its verifier for 512" in w for w in found.warnings)


def test_a_window_is_kept_and_said(tmp_path, verifier):
    layer = {"sliding_window": 16, "layer_types": ["sliding_attention"]}
    source = layouts.speculators(tmp_path / "s", SHAPE, DRAFT, ids=AFTER, layer=layer)
    plan = plan_of(source, verifier)
    assert json.loads(plan.config.to_json())["transformer_layer_config"]["sliding_window"] == 16
    assert any("last 16 tokens" in warning for warning in plan.inspection.warnings)


def test_nothing_typed_is_null_in_a_result(tmp_path, verifier):
    """A21: a strict reader, such as vLLM's, takes no null for a number."""

    def nulls(value, path=""):
        if isinstance(value, dict):
            return [p for k, v in value.items() for p in nulls(v, f"{path}.{k}")]
        return [path] if value is None else []

    for layout, (make, how) in SIX.items():
        source = make(tmp_path / layout, SHAPE, DRAFT, **how)
        assert nulls(json.loads(plan_of(source, verifier).config.to_json())) == [], layout


def test_a_head_that_some_config_ties_stays_its_own(tmp_path, verifier):
    """A12: with a whole vocabulary, and the switch on, off or missing."""
    shape = Shape(draft_vocab=128)
    draft = layouts.weights(shape, embedding=True)
    for tied in (True, False, None):
        for make in (layouts.research, layouts.angelslim, layouts.speculators):
            name = f"{make.__name__} {tied}"
            source = make(tmp_path / name, shape, draft, ids=None, tie_word_embeddings=tied)
            convert(params(source, verifier, aux_layers=tuple(AFTER)), tmp_path / f"{name} out")
            again = load_speculator(tmp_path / f"{name} out")
            assert torch.equal(again.lm_head.weight, draft["lm_head.weight"]), name
            assert torch.equal(again.embed_tokens.weight, draft["embed_tokens.weight"]), name


def test_a_draft_narrower_than_its_verifier_keeps_its_embedding(tmp_path):
    """A19"""
    shape = Shape(hidden=32, wide=48)
    verifier = layouts.verifier(tmp_path / "v", shape)
    draft = layouts.weights(shape, embedding=True)
    for make, ids in ((layouts.angelslim, OUTPUT), (layouts.speculators, AFTER)):
        source = make(tmp_path / make.__name__, shape, draft, ids=ids)
        convert(params(source, verifier), tmp_path / f"{make.__name__} out")
        found = load_speculator(tmp_path / f"{make.__name__} out")
        assert found.config.target_hidden_size == 48
        assert logits(found, *inputs(shape)).isfinite().any()


@pytest.mark.parametrize("layout", ["eagle3-research", "eagle3-model-optimizer", "speculators"])
def test_several_draft_layers_are_kept(tmp_path, verifier, layout):
    make, how = SIX[layout]
    how = how | ({"prefix": "layers.0."} if layout == "eagle3-research" else {})
    shape = Shape(layers=3)
    source = make(tmp_path / "s", shape, layouts.weights(shape, embedding=True), **how)
    config = plan_of(source, verifier).config
    assert config.transformer_layer_config.num_hidden_layers == 3


def test_another_number_of_aux_states_is_written_where_vllm_looks(tmp_path, verifier):
    shape = Shape(num_aux=4)
    source = layouts.model_optimizer(
        tmp_path / "m", shape, layouts.weights(shape), ids=[1, 3, 4, 6]
    )
    convert(params(source, verifier), tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    found = load_speculator(tmp_path / "out", embedding=DRAFT["embed_tokens.weight"])
    assert found.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5, 7]
    assert logits(found, *inputs(shape)).isfinite().any()
    nameless = layouts.research(tmp_path / "r", shape, layouts.weights(shape))
    with pytest.raises(CheckpointError, match="takes 4 aux states, and the checkpoint does not"):
        plan_of(nameless, verifier)


# how the verifier is named


def test_a_local_path_is_warned_of_and_a_hub_id_offered(tmp_path, verifier):
    """A22"""
    source = layouts.speculators(tmp_path / "s", SHAPE, DRAFT, ids=AFTER, name="org/known")
    plan = plan_of(source, verifier)
    assert plan.config.speculators_config.verifier.name_or_path == str(verifier)
    (warning,) = plan.inspection.warnings
    assert "--verifier-name org/known" in warning
    assert str(verifier) not in warning
    named = plan_of(source, verifier, verifier_name="org/chosen")
    assert named.config.speculators_config.verifier.name_or_path == "org/chosen"
    assert named.inspection.warnings == []


def test_the_users_home_is_in_no_output(tmp_path, monkeypatch):
    """A22"""
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ada"))
    verifier = layouts.verifier(tmp_path / "home" / "ada" / "models" / "v", SHAPE)
    source = layouts.research(tmp_path / "home" / "ada" / "r", SHAPE, BARE)
    convert(params(source, verifier, aux_layers=tuple(AFTER)), tmp_path / "out")
    written = config_of(tmp_path / "out")["speculators_config"]["verifier"]
    assert written["name_or_path"] == "~/models/v"
    for file in (tmp_path / "out").iterdir():
        assert b"home/ada" not in file.read_bytes(), file.name


def test_a_snapshot_in_a_hub_cache_is_named_by_its_id(tmp_path):
    place = tmp_path / "models--org--big-model" / "snapshots" / ("0123abcd" * 5)
    verifier = layouts.verifier(place, SHAPE)
    plan = plan_of(layouts.research(tmp_path / "r", SHAPE, BARE), verifier)
    assert plan.config.speculators_config.verifier.name_or_path == "org/big-model"
    assert plan.inspection.warnings == []


def test_every_fault_in_the_documentation_has_the_test_that_is_named(request):
    root = request.config.rootpath
    page = (root / "docs" / "conversion.md").read_text()
    rows = re.findall(r"^\| (A\d+) \| .+ \| (`test_.+`) \|$", page, re.MULTILINE)
    numbers = (6, 7, *range(9, 16), 17, *range(19, 26))
    assert [row for row, _ in rows] == [f"A{n}" for n in numbers]
    tests = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    named = re.findall(r"test_\w+", " ".join(names for _, names in rows))
    assert [name for name in named if f"def {name}(" not in tests] == []
