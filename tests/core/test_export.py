"""Export: the identity after converting back, nothing lost in silence, no null, no local path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors import safe_open

from speculators_core.config import Eagle3Config
from speculators_core.conversion.convert import convert
from speculators_core.conversion.export import export
from speculators_core.conversion.exported import LayoutConfig
from speculators_core.errors import CheckpointError, Conflict, InputError, Stopped
from speculators_core.params import ConvertParams, ExportParams
from tests import tiny

PLAIN = {"norm_before_residual": False, "norm_output": False}


def exported(speculator: Path, output: Path, **more: Any):
    return export(ExportParams.model_validate({"speculator": str(speculator), **more}), output)


def converted(checkpoint: Path, verifier: Path, output: Path, **more: Any) -> Path:
    values = {"checkpoint": str(checkpoint), "verifier": str(verifier), **more}
    convert(ConvertParams.model_validate({"validate_on_verifier": False, **values}), output)
    return output


def raw_tensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Bit for bit: dtype, shape and bytes by name, from all weight files."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = (entry["dtype"], entry["shape"], content[start:end])
    return found


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def variants(verifier: Path) -> Iterator[tuple[str, Eagle3Config, dict[str, Any]]]:
    """Drafts that differ in what a layout has to hold, and what converting back must be told."""
    make = lambda **changes: tiny.draft_config(verifier, **{**PLAIN, **changes})  # noqa: E731
    yield "plain", make(), {}
    yield "half", make(dtype="float16"), {}
    yield "bfloat16", make(dtype="bfloat16"), {}
    yield "whole vocabulary", make(draft_vocab=tiny.VOCAB), {}
    yield "rope base", make(rope_theta=500000.0), {}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0}
    layer = make().transformer_layer_config.model_dump() | {"rope_parameters": rope}
    yield "yarn", make(transformer_layer_config=layer), {}
    yield "other layers", make(aux_layers=(3, 5, 8)), {}
    yield "residual", make(norm_before_residual=True), {}
    yield "one norm", make(norm_before_fc=True), {}
    yield "three norms", make(fc_norm=True), {}
    yield "fed back", make(norm_output=True), {"norm_output": True}


@pytest.mark.parametrize("layout", ["research", "specforge"])
def test_converting_back_gives_the_same_draft_bit_for_bit(tiny_verifier, tmp_path, layout):
    for name, config, told in variants(tiny_verifier):
        speculator = tiny.build_speculator(tmp_path / name, tiny_verifier, config=config)
        there = tmp_path / f"{name} there"
        exported(speculator, there, format=layout, accept_losses=True)
        if layout == "research" or name == "other layers":  # a loss that the export names
            told = {**told, "aux_layers": config.eagle_aux_hidden_state_layer_ids}
        back = converted(there, tiny_verifier, tmp_path / f"{name} back", **told)
        assert raw_tensors(back) == raw_tensors(speculator), name
        assert config_of(back) == config_of(speculator), name


def test_names_are_the_layouts_own_and_bytes_are_untouched(tiny_verifier, tmp_path):
    config = tiny.draft_config(tiny_verifier, **PLAIN)
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    exported(speculator, tmp_path / "out", format="research")
    ours, theirs = raw_tensors(speculator), raw_tensors(tmp_path / "out")
    assert {n for n in theirs if "layer" in n} == {n for n in theirs if n.startswith("midlayer.")}
    assert theirs["midlayer.hidden_norm.weight"] == ours["layers.0.hidden_norm.weight"]
    assert len(theirs) == len(ours)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc", "norm_output"])
def test_a_switch_that_readers_would_ignore_is_refused_unless_accepted(
    tiny_verifier, tmp_path, switch
):
    config = tiny.draft_config(tiny_verifier, **{**PLAIN, switch: True})
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    with pytest.raises(InputError, match=f"can't hold {switch}") as refused:
        exported(speculator, tmp_path / "out")
    assert "--accept-losses" in str(refused.value.hint)
    assert not list(tmp_path.glob("*out*"))
    result = exported(speculator, tmp_path / "out", accept_losses=True)
    assert [loss.field for loss in result.losses if loss.serious] == [switch]
    assert config_of(tmp_path / "out")[switch] is True
    assert f"not held: {switch}" in (tmp_path / "out" / "README.md").read_text()


def test_specforge_holds_a_norm_for_each_state_and_research_does_not(tiny_verifier, tmp_path):
    config = tiny.draft_config(tiny_verifier, **PLAIN, fc_norm=True)
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    exported(speculator, tmp_path / "specforge")
    with pytest.raises(InputError, match="can't hold fc_norm"):
        exported(speculator, tmp_path / "research", format="research")


def test_aux_ids_are_written_as_outputs_or_named_as_lost(tiny_verifier, tmp_path):
    config = tiny.draft_config(tiny_verifier, **PLAIN, aux_layers=(3, 4, 6))
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    result = exported(speculator, tmp_path / "specforge")
    block = config_of(tmp_path / "specforge")["eagle_config"]
    assert block == {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    assert any("25454" in loss.meaning for loss in result.losses)  # SGLang's two readings
    result = exported(speculator, tmp_path / "research", format="research")
    assert any("--aux-layers 3,4,6" in loss.meaning for loss in result.losses)
    assert "eagle_config" not in config_of(tmp_path / "research")
    with pytest.raises(InputError, match="others than these"):
        exported(speculator, tmp_path / "x", format="research", verifier=str(tiny_verifier))
    usual = tiny.draft_config(tiny_verifier, **PLAIN, aux_layers=(2, 4, 5))
    good = tiny.build_speculator(tmp_path / "good", tiny_verifier, config=usual)
    result = exported(good, tmp_path / "y", format="research", verifier=str(tiny_verifier))
    assert not any(loss.serious for loss in result.losses)


def test_what_no_layout_can_say_is_an_error(tiny_verifier, tmp_path):
    for name, changes, complaint in (
        ("deep", {"layers": 2}, "one draft layer"),
        ("qwen", {"kind": "qwen3"}, "a Llama's layer, this draft has a Qwen3's"),
        ("embedding", {"aux_layers": (0, 4, 5)}, "outputs of layers"),
    ):
        config = tiny.draft_config(tiny_verifier, **{**PLAIN, **changes})
        speculator = tiny.build_speculator(tmp_path / name, tiny_verifier, config=config)
        with pytest.raises(InputError, match=complaint):
            exported(speculator, tmp_path / "out", accept_losses=True)


def test_the_config_is_strict_and_holds_no_null(tiny_verifier, tmp_path):
    """A21: engines type these fields; null is none of their types."""
    config = tiny.draft_config(tiny_verifier, **PLAIN, aux_layers=None)
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    exported(speculator, tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    assert "null" not in text
    LayoutConfig.model_validate_json(text)
    for field, wrong in (("hidden_size", "64"), ("rope_theta", None), ("unknown", 1)):
        with pytest.raises(ValidationError):
            LayoutConfig.model_validate_json(json.dumps({**json.loads(text), field: wrong}))


def test_neither_report_nor_card_names_a_path_of_this_machine(tiny_verifier, tmp_path):
    """A22."""
    config = tiny.draft_config(tiny_verifier, **PLAIN)
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    result = exported(speculator, tmp_path / "out")
    assert any("--verifier-name" in note for note in result.commands.notes)
    for file in (tmp_path / "out").glob("*.*"):
        if file.suffix != ".safetensors":
            text = file.read_text()
            assert str(tmp_path) not in text and str(Path.home()) + "/" not in text, file
    report = json.loads(Path(result.report).read_text())
    assert len(report["source"]["sha256"]["model.safetensors"]) == 64


def test_a_damaged_speculator_a_taken_place_and_a_stop_leave_nothing(tiny_verifier, tmp_path):
    config = tiny.draft_config(tiny_verifier, **PLAIN)
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)

    class Stopping:
        def update(self, *_: object) -> None: ...
        def metrics(self, *_: object) -> None: ...
        def note(self, *_: object) -> None: ...
        def stopping(self) -> bool:
            return True

    params = ExportParams(speculator=str(speculator))
    with pytest.raises(Stopped):
        export(params, tmp_path / "out", Stopping())
    (tmp_path / "taken").mkdir()
    with pytest.raises(Conflict):
        export(params, tmp_path / "taken")
    weights = speculator / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        export(params, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"s", "taken"}


def test_a_verifier_below_the_home_directory_is_one_that_a_shell_finds(tiny_verifier, tmp_path):
    """A22: the config names it from `~`, which a shell leaves alone in quotes."""
    config = tiny.draft_config("~/models/v", **PLAIN)
    speculator = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    result = exported(speculator, tmp_path / "out")
    for line in (result.commands.vllm, result.commands.sglang):
        assert f"{Path.home()}/models/v" in line and "~" not in line
