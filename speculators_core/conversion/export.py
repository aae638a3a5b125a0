"""A speculator in the layouts that other tools read: research (SafeAILab/EAGLE) and SpecForge.

Tensors keep their bytes and change their names; config fields are said in the layout's words. What
a layout has no words for is a loss, named in the result. A loss after which the layout's own
readers would compute something else is refused, unless the person accepts it: then the switch is
written as a further key, which `speclab convert` reads and they ignore. Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from speculators_core.config import Eagle3Config, default_aux_layers
from speculators_core.conversion.card import card
from speculators_core.conversion.digest import Digests
from speculators_core.conversion.source import Source, open_source
from speculators_core.errors import CheckpointError, InputError, Stopped
from speculators_core.hub.headers import small_files
from speculators_core.launch import EXPORT_REPORT, Commands, Served, lines, portable_name
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.output import complete_or_absent
from speculators_core.params import ExportParams
from speculators_core.progress import Progress, Quiet
from speculators_core.weights import Pending, check_shapes, write_weights

_IDS = "eagle_aux_hidden_state_layer_ids"
_FIRST = "layers.0."
_BIASES = ("attention_bias", "mlp_bias")
_SWITCHES = {
    "norm_before_residual": "the residual carries the normed state",
    "norm_before_fc": "one norm over the concatenated states",
    "fc_norm": "a norm for each concatenated state",
    "norm_output": "the normed state is fed back",
}


class Loss(BaseModel):
    """What the layout can't say. `serious`: its readers would compute something else."""

    model_config = ConfigDict(frozen=True)

    field: str
    value: Any
    meaning: str
    serious: bool = False


class ExportResult(BaseModel):
    """What `speclab export --json` prints."""

    model_config = ConfigDict(frozen=True)

    output: str
    report: str
    format: str
    losses: list[Loss]
    commands: Commands


class EagleBlock(BaseModel):
    """SpecForge's `eagle_config`: 0-based ids of the layers whose output is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    eagle_aux_hidden_state_layer_ids: list[int]


class LayoutConfig(BaseModel):
    """`config.json` of both layouts, strict: a Llama config in the words of transformers 4, which
    these tools read. None stands for a field that is left out; no null is ever written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architectures: list[str]
    model_type: Literal["llama"] = "llama"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: Literal[False] = False
    torch_dtype: str
    target_hidden_size: int | None = None
    eagle_config: EagleBlock | None = None
    norm_before_residual: bool | None = Field(None, description="not the layout's own: see Loss")
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def to_json(self) -> str:
        """The text of config.json, read back as strictly as it was made."""
        text = json.dumps(self.model_dump(exclude_none=True), indent=2) + "\n"
        if LayoutConfig.model_validate_json(text) != self or "null" in text:
            raise CheckpointError("the config can't be written without loss", where="config.json")
        return text


@dataclass(frozen=True)
class _Layout:
    name: str
    architecture: str
    readers: str
    switches: frozenset[str]
    """Those that its readers know, by the tensors that go with them."""


_LAYOUTS = {
    "research": _Layout("research", "LlamaForCausalLM", "SafeAILab/EAGLE", frozenset()),
    "specforge": _Layout(
        "specforge", "LlamaForCausalLMEagle3", "SpecForge and SGLang", frozenset({"fc_norm"})
    ),
}


def export(
    params: ExportParams, output: str | Path, progress: Progress | None = None
) -> ExportResult:
    """Write the speculator at `params.speculator` to `output`, which must not exist yet.

    Raises `CheckpointError` where it is no EAGLE-3 draft in speculators format, `InputError` where
    the layout can't hold it, `Conflict` where `output` exists, `Stopped` on request; nothing is
    left behind then.
    """
    output, progress = Path(output), progress or Quiet()
    directory = Path(params.speculator)
    config = Eagle3Config.load(directory)
    layout = _LAYOUTS[params.format]
    verifier = read_verifier(small_files(params.verifier)) if params.verifier else None
    with complete_or_absent(output) as partial:
        source = open_source(directory)
        found = {name: info.shape for name, info in source.tensors.items()}
        check_shapes(found, config.tensor_shapes(), directory, {"embed_tokens.weight"})
        losses = [*_losses(config, layout, verifier), *_precision_losses(source, config)]
        _refuse(losses, layout, params)
        for loss in losses:
            progress.note(f"Not held: {loss.field} ({loss.meaning})")
        text = _config(config, layout).to_json()
        (partial / "config.json").write_text(text, encoding="utf-8")
        with Digests(source.files) as digests:
            _write(source, partial, progress)
            named = config.speculators_config.verifier.name_or_path
            known = portable_name(params.verifier or named)
            facts = _Facts(config, layout, losses, known, digests.wait())
        _describe(partial, output.name, directory, source, facts)
    served = Served(
        algorithm="eagle3",
        model=str(directory),
        verifier=named or known,
        speculative_tokens=config.speculative_tokens,
    )
    return ExportResult(
        output=str(output),
        report=str(output / EXPORT_REPORT),
        format=layout.name,
        losses=losses,
        commands=_commands(served, layout, output),
    )


def _commands(served: Served, layout: _Layout, output: Path) -> Commands:
    """vLLM serves the speculator as it was, SGLang what was written."""
    found = lines(served)
    exported = lines(served.model_copy(update={"model": str(output), "layout": layout.name}))
    return found.model_copy(update={"sglang": exported.sglang, "notes": exported.notes})


def _losses(
    config: Eagle3Config, layout: _Layout, verifier: VerifierFacts | None
) -> Iterator[Loss]:
    layer = config.transformer_layer_config
    if layer.num_hidden_layers > 1:
        raise InputError(
            f"the {layout.name} layout has one draft layer, this draft has "
            f"{layer.num_hidden_layers}",
            where="num_hidden_layers",
            hint="vLLM serves it as it is",
        )
    for switch, meaning in _SWITCHES.items():
        if getattr(config, switch) and switch not in layout.switches:
            if switch == "norm_output" and layout.name == "specforge":
                meaning += "; SpecForge's switch of this name is another: --norm-output back"
            yield Loss(field=switch, value=True, meaning=meaning, serious=True)
    for bias in _BIASES:
        if getattr(layer, bias):
            yield Loss(field=bias, value=True, meaning="linear layers have biases", serious=True)
    yield from (_research_ids if layout.name == "research" else _specforge_ids)(config, verifier)
    k = config.speculative_tokens
    yield Loss(field="speculative_tokens", value=k, meaning="a server is told at its start")
    if config.embed_requires_grad:
        yield Loss(field="embed_requires_grad", value=True, meaning="matters to trainers alone")
    yield Loss(
        field="speculators_config.verifier",
        value=portable_name(config.speculators_config.verifier.name_or_path),
        meaning="the layout names no verifier",
    )
    yield from _passed_through(config)


def _passed_through(config: Eagle3Config) -> Iterator[Loss]:
    """Further keys of the layers' config; of those only a window of attention changes numbers."""
    window = _window(config)
    for name, value in (config.transformer_layer_config.model_extra or {}).items():
        if name == "sliding_window" and window:
            meaning = "the draft looks back over so many tokens only"
            yield Loss(field=name, value=value, meaning=meaning, serious=True)
        elif value is not None and name not in (*window, "use_sliding_window"):
            yield Loss(field=name, value=value, meaning="no reader of the layout needs it")


def _window(config: Eagle3Config) -> dict[str, Any]:
    """The keys of a window of attention, where one is in use."""
    extra = config.transformer_layer_config.model_extra or {}
    keys = {name: extra.get(name) for name in ("sliding_window", "layer_types")}
    return keys if "sliding_attention" in (keys["layer_types"] or ()) else {}


def _research_ids(config: Eagle3Config, verifier: VerifierFacts | None) -> Iterator[Loss]:
    ids = config.eagle_aux_hidden_state_layer_ids
    said = "EAGLE's code takes the states after layers 2, n/2 and n-3 of an n-layer verifier"
    if ids is None:
        yield Loss(field=_IDS, value=None, meaning=f"unknown here, too; {said}")
    elif verifier is None:
        known = ",".join(map(str, ids))
        yield Loss(field=_IDS, value=ids, meaning=f"{said}; to convert back: --aux-layers {known}")
    else:
        implied = list(default_aux_layers(verifier.num_hidden_layers))
        fits = "just these" if implied == ids else f"here {implied}, others than these"
        serious = implied != ids
        yield Loss(field=_IDS, value=ids, meaning=f"{said}: {fits}", serious=serious)


def _specforge_ids(config: Eagle3Config, _verifier: VerifierFacts | None) -> Iterator[Loss]:
    ids = config.eagle_aux_hidden_state_layer_ids
    if ids is None:
        meaning = "unknown here, too; SGLang takes the states after layers 2, n/2 and n-3"
        yield Loss(field=_IDS, value=None, meaning=meaning)
        return
    if ids[0] == 0:
        raise InputError(
            "the layout counts outputs of layers, and this draft sees the embedding's",
            where=_IDS,
            hint="vLLM serves it as it is",
        )
    if len(ids) != 3:
        meaning = "SpecForge and SGLang take exactly three"
        yield Loss(field=_IDS, value=ids, meaning=meaning, serious=True)
    if ids[0] != 2:
        meaning = (
            f"written as outputs {[k - 1 for k in ids]}; SGLang since its pull request 25454 adds "
            "one only to a list that begins with 1, and would take the layers before these; to "
            f"convert back: --aux-layers {','.join(map(str, ids))}"
        )
        yield Loss(field=_IDS, value=ids, meaning=meaning)


def _precision_losses(source: Source, config: Eagle3Config) -> Iterator[Loss]:
    others = sorted(
        name for name, info in source.tensors.items() if info.dtype != config.tensor_dtype(name)
    )
    if others:
        meaning = f"{', '.join(others)} are stored otherwise and are written as they are"
        yield Loss(field="dtype", value=config.dtype, meaning=meaning)


def _refuse(losses: list[Loss], layout: _Layout, params: ExportParams) -> None:
    serious = [loss for loss in losses if loss.serious]
    if serious and not params.accept_losses:
        found = "; ".join(f"{loss.field} ({loss.meaning})" for loss in serious)
        raise InputError(
            f"the {layout.name} layout can't hold {found}",
            where=params.speculator,
            hint=f"{layout.readers} would draft something else. --accept-losses writes it all the "
            "same, for `speclab convert` to read back",
        )


def _config(config: Eagle3Config, layout: _Layout) -> LayoutConfig:
    layer = config.transformer_layer_config
    rope = dict(layer.rope_parameters)
    theta = rope.pop("rope_theta")
    ids = config.eagle_aux_hidden_state_layer_ids
    held = layout.name == "specforge" and ids is not None
    block = EagleBlock(**{_IDS: [k - 1 for k in ids or ()]}) if held else None
    switches: dict[str, Any] = {name: getattr(config, name) or None for name in _SWITCHES}
    switches |= {name: getattr(layer, name) or None for name in _BIASES}
    return LayoutConfig(
        architectures=[layout.architecture],
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=layer.num_hidden_layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        rms_norm_eps=layer.rms_norm_eps,
        hidden_act=layer.hidden_act,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        max_position_embeddings=layer.max_position_embeddings,
        rope_theta=float(theta),
        rope_scaling=None if rope.get("rope_type", "default") == "default" else rope,
        torch_dtype=config.dtype,
        target_hidden_size=config.target_hidden_size,
        eagle_config=block,
        **switches,
        **_window(config),
    )


def layout_name(name: str) -> str:
    """What the layouts call a tensor of the speculators format."""
    return f"midlayer.{name.removeprefix(_FIRST)}" if name.startswith(_FIRST) else name


def _write(source: Source, partial: Path, progress: Progress) -> None:
    pending = [
        Pending(
            name=layout_name(name),
            shape=info.shape,
            dtype=info.dtype,
            pieces=lambda name=name: source.pieces(name),  # type: ignore[misc]
        )
        for name, info in source.tensors.items()
    ]
    for done, name in enumerate(write_weights(partial, pending), start=1):
        progress.update(done / len(pending), f"wrote {name}")
        if progress.stopping():
            raise Stopped("the export was stopped; nothing was written")


@dataclass(frozen=True)
class _Facts:
    config: Eagle3Config
    layout: _Layout
    losses: list[Loss]
    verifier: str
    digests: dict[str, str]


def _describe(partial: Path, name: str, directory: Path, source: Source, facts: _Facts) -> None:
    """The report and the card; neither holds a path of this machine."""
    config, layout = facts.config, facts.layout
    served = Served(
        algorithm="eagle3",
        model=name,
        verifier=facts.verifier,
        speculative_tokens=config.speculative_tokens,
        layout=layout.name,
    )
    report = {
        "layout": layout.name,
        "source": {"name": directory.name, "sha256": facts.digests},
        "tensors": {layout_name(name): name for name in sorted(source.tensors)},
        "losses": [loss.model_dump() for loss in facts.losses],
        "serving": served.model_dump(exclude={"model"}),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (partial / EXPORT_REPORT).write_text(text, encoding="utf-8")
    ids = config.eagle_aux_hidden_state_layer_ids
    shown = {
        "Verifier": facts.verifier,
        "Algorithm": "EAGLE-3",
        "Layout": f"{layout.name}, for {layout.readers}",
        "Aux states": "unknown" if ids is None else f"after layers {ids}",
        "Precision": config.dtype,
        "Source": ", ".join(f"{file} sha256 {value}" for file, value in facts.digests.items()),
        "Licence": "that of the speculator it was made from",
    }
    about = f"An EAGLE-3 draft for {facts.verifier}, exported by Speclab."
    notes = [f"not held: {loss.field} {loss.value} ({loss.meaning})" for loss in facts.losses]
    written = card(name, about, shown, served, tags=("eagle3", "speculative-decoding"), notes=notes)
    (partial / "README.md").write_text(written, encoding="utf-8")
