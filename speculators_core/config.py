"""The speculators-format `config.json` of an EAGLE-3 draft, typed.

The field names, the nesting and the meaning are those of vllm-project/speculators 0.9.0; every
switch is always written explicitly, because readers disagree on defaults (vLLM 0.32 takes a
missing `norm_before_residual` as true, speculators as false). Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from speculators_core.errors import CheckpointError
from speculators_core.params import MOST_DRAFTED
from speculators_core.untrusted import JSON_BYTES, parse_json, read_bounded

SPECULATORS_VERSION = "0.9.0"
USUAL_AUX = 3
"""How many aux states vLLM's Llama draft counts where no `num_aux_hidden_states` says another."""
LAYER_TYPES = ("llama", "qwen3")
"""What the layers of an EAGLE-3 draft can be (`LayerConfig.model_type`)."""

SomeConfig = TypeVar("SomeConfig", bound=BaseModel)


class Proposal(BaseModel):
    """How many tokens are drafted a step, and how they are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(ge=1, le=MOST_DRAFTED)
    verifier_accept_k: int = 1
    accept_tolerance: float = 0.0


class Verifier(BaseModel):
    """The model that the draft works for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name_or_path: str
    architectures: list[str]


class Speculators(BaseModel):
    """The `speculators_config` block."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Literal["eagle3", "dflash", "mtp"] = "eagle3"
    default_proposal_method: Literal["greedy"] = "greedy"
    proposal_methods: list[Proposal] = Field(min_length=1)
    verifier: Verifier


class DecoderConfig(BaseModel):
    """Decoder layers as a transformers config; further keys of such a config pass through."""

    model_config = ConfigDict(frozen=True, extra="allow")

    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1, le=1000)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    rms_norm_eps: float = Field(gt=0)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any]
    attention_bias: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, values: Any) -> Any:
        """transformers 4 wrote rope_theta and rope_scaling, and left out what it could derive."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        rope = rope_parameters(values)
        values.pop("rope_theta", None)
        values.pop("rope_scaling", None)
        if rope is not None:
            values["rope_parameters"] = rope
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        if values.get("num_key_value_heads") is None and heads is not None:
            values["num_key_value_heads"] = heads
        if values.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int):
            values["head_dim"] = hidden // max(heads, 1)
        return values

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if "rope_theta" not in self.rope_parameters:
            raise ValueError("rope_parameters has no rope_theta")
        return self


class LayerConfig(DecoderConfig):
    """The layers of an EAGLE draft: a Llama's, or a Qwen3's, which norms query and key per head."""

    model_type: Literal["llama", "qwen3"] = "llama"
    hidden_act: Literal["silu"] = "silu"  # all that vLLM's layers compute
    intermediate_size: int = Field(ge=1)
    mlp_bias: bool = False

    @model_validator(mode="before")
    @classmethod
    def _qwen3_says_its_heads(cls, values: Any) -> Any:
        """A Qwen3 config that is silent means heads of 128 and 32 of them to transformers, and
        H / heads to vLLM."""
        if isinstance(values, dict) and values.get("model_type") == "qwen3":
            for field in ("head_dim", "num_key_value_heads"):
                if values.get(field) is None:
                    raise ValueError(f"{field} is missing: readers of Qwen3 layers differ on it")
        return values

    @model_validator(mode="after")
    def _qwen3_has_no_mlp_bias(self) -> LayerConfig:
        if self.norms_heads and self.mlp_bias:
            raise ValueError("mlp_bias is true: the MLP of a Qwen3 layer has no biases")
        return self

    @property
    def norms_heads(self) -> bool:
        """Whether query and key of each head are normed before they are rotated (Qwen3)."""
        return self.model_type == "qwen3"


class WrittenConfig(BaseModel):
    """A `config.json` that is read strictly (unknown keys are errors) and written without nulls,
    which other readers take for values. Frozen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: dict[str, Any], *, where: str) -> Self:
        """A config from its JSON values, or a `CheckpointError` that names the first bad field."""
        return parse_config(cls, values, where=where)

    def to_json(self) -> str:
        """The text of config.json."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=2) + "\n"


class SpeculatorConfig(WrittenConfig):
    """What the `config.json` of a speculator says whatever its algorithm."""

    architectures: list[str]
    speculators_model_type: str
    speculators_version: str = SPECULATORS_VERSION
    tie_word_embeddings: Literal[False] = False
    dtype: Literal["float32", "float16", "bfloat16"]
    speculators_config: Speculators
    transformer_layer_config: DecoderConfig

    @model_validator(mode="after")
    def _one_algorithm(self) -> Self:
        if self.algorithm != self.speculators_model_type:
            raise ValueError(
                f"speculators_config.algorithm is {self.algorithm!r}, "
                f"not {self.speculators_model_type!r}"
            )
        return self

    @property
    def algorithm(self) -> str:
        return self.speculators_config.algorithm

    @property
    def speculative_tokens(self) -> int:
        """The K that the file proposes."""
        return self.speculators_config.proposal_methods[0].speculative_tokens

    @property
    def vocab_size(self) -> int:
        """V, the verifier's vocabulary."""
        return self.transformer_layer_config.vocab_size

    def tensor_dtype(self, name: str) -> str:
        """The dtype of one tensor of such a checkpoint, in torch's words."""
        return {"d2t": "int64", "t2d": "bool"}.get(name, self.dtype)


class Eagle3Config(SpeculatorConfig):
    """`config.json` of an EAGLE-3 speculator."""

    architectures: list[str] = ["Eagle3DraftModel"]
    speculators_model_type: Literal["eagle3"] = "eagle3"
    draft_vocab_size: int = Field(ge=1)
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_requires_grad: bool = False
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    transformer_layer_config: LayerConfig

    @model_validator(mode="after")
    def _consistent(self) -> Eagle3Config:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is larger than "
                f"the verifier's vocab_size {self.vocab_size}"
            )
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is not None and (not ids or sorted(set(ids)) != ids or ids[0] < 0):
            raise ValueError(f"aux layer ids {ids} must be ascending, distinct and at least 0")
        return self

    @property
    def hidden_size(self) -> int:
        """Hd, the draft's width."""
        return self.transformer_layer_config.hidden_size

    @property
    def verifier_hidden_size(self) -> int:
        """H, the width of one aux state."""
        return self.target_hidden_size or self.hidden_size

    @property
    def num_aux(self) -> int:
        """How many verifier states are concatenated (3 when the ids are unknown)."""
        ids = self.eagle_aux_hidden_state_layer_ids
        return len(ids) if ids is not None else 3

    @property
    def has_vocab_map(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def vllm_obstacle(self) -> str | None:
        """Why vLLM 0.32 can't serve this draft, in words; None where it can."""
        layer = self.transformer_layer_config
        if layer.norms_heads and layer.attention_bias:
            return (
                "vLLM 0.32 has no bias at the output projection of Qwen3 layers, and does not load "
                "a draft whose attention_bias is true"
            )
        return None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of such a checkpoint, the embedding included.

        The same as the state dict of `models.eagle3.Eagle3Draft`, without building it.
        """
        layer, hd = self.transformer_layer_config, self.hidden_size
        width = self.num_aux * self.verifier_hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, hd),
            "fc.weight": (hd, width),
            "norm.weight": (hd,),
            "lm_head.weight": (self.draft_vocab_size, hd),
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (width,)
        if self.fc_norm:
            for i in range(self.num_aux):
                shapes[f"fc_norm.{i}.weight"] = (self.verifier_hidden_size,)
        if self.has_vocab_map:
            shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}
        for i in range(layer.num_hidden_layers):
            shapes |= {f"layers.{i}.{name}": s for name, s in _layer_shapes(layer, i == 0).items()}
        return shapes

    @classmethod
    def load(cls, directory: Path) -> Eagle3Config:
        """Read DIR/config.json. Raises `CheckpointError` that names the first bad field."""
        values = read_json(directory / "config.json")
        kind = values.get("speculators_model_type")
        if kind is None and values.get("architectures") != ["EagleLlamaForCausalLM"]:
            raise CheckpointError(
                "this is not a speculators-format checkpoint: "
                "config.json has no speculators_model_type",
                where=str(directory / "config.json"),
                hint="convert it first: speclab convert CHECKPOINT --verifier V --output DIR",
            )
        if kind != "eagle3":
            raise CheckpointError(
                f"this is no EAGLE-3 draft but one of type {kind or 'eagle'!r}",
                where=str(directory / "config.json"),
                hint="only EAGLE-3 drafts are trained and run here; serve this one with vLLM",
            )
        return cls.parse(values, where=str(directory / "config.json"))


def parse_config(model: type[SomeConfig], values: dict[str, Any], *, where: str) -> SomeConfig:
    """The typed config of a draft, or a `CheckpointError` that names the first bad field."""
    values = dict(values)
    values.pop("auto_map", None)  # written by the speculators trainer; names code, never run
    values.pop("transformers_version", None)
    if "torch_dtype" in values:  # transformers 4
        values.setdefault("dtype", values.pop("torch_dtype"))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "config"
        found = "" if isinstance(first.get("input"), dict) else f", found {first['input']!r}"
        raise CheckpointError(
            f"{field}: {first['msg']}{found}",
            where=where,
            hint="correct the field, or convert the checkpoint again",
        ) from error


def _layer_shapes(layer: LayerConfig, first: bool) -> dict[str, tuple[int, ...]]:
    hd, inner = layer.hidden_size, layer.intermediate_size
    heads = layer.num_attention_heads * layer.head_dim
    kv_heads = layer.num_key_value_heads * layer.head_dim
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hd,),
        "post_attention_layernorm.weight": (hd,),
        "self_attn.o_proj.weight": (hd, heads),
        "mlp.gate_proj.weight": (inner, hd),
        "mlp.up_proj.weight": (inner, hd),
        "mlp.down_proj.weight": (hd, inner),
    }
    shapes |= {f"self_attn.{n}.weight": (r, 2 * hd if first else hd) for n, r in rows.items()}
    if first:
        shapes["hidden_norm.weight"] = (hd,)
    if layer.norms_heads:
        shapes |= {f"self_attn.{n}_norm.weight": (layer.head_dim,) for n in ("q", "k")}
    if layer.attention_bias:
        shapes |= {f"self_attn.{n}.bias": (r,) for n, r in {**rows, "o_proj": hd}.items()}
    if layer.mlp_bias:
        shapes |= {f"mlp.{n}.bias": (inner,) for n in ("gate_proj", "up_proj")}
        shapes["mlp.down_proj.bias"] = (hd,)
    return shapes


def rope_parameters(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters` of a model config: transformers 5 as it is, transformers 4 put into that
    form; None where the config names no base.
    """
    given = values.get("rope_parameters")
    if isinstance(given, dict):
        return {"rope_type": "default", **given}
    if values.get("rope_theta") is None:
        return None
    scaling = dict(values.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    return {"rope_theta": float(values["rope_theta"]), "rope_type": kind, **scaling}


def default_aux_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """[2, n//2, n-3], counted "after k layers" (EAGLE, speculators and vLLM agree).

    Raises `CheckpointError` where the three collide (fewer than 6 layers).
    """
    ids = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        raise CheckpointError(
            f"the default aux layers {ids} collide for a verifier of {num_hidden_layers} layers",
            hint="name the aux layers yourself: --aux-layers",
        )
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint, or a `CheckpointError`; see `untrusted`."""
    try:
        values = parse_json(read_bounded(path, JSON_BYTES))
    except FileNotFoundError:
        hint = "is this a checkpoint directory?"
        if not path.parent.is_dir():
            hint = "there is no such directory; what is on the hub, speclab pull ORG/NAME fetches"
        raise CheckpointError(f"{path.name} is missing", where=str(path), hint=hint) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path.name} can't be read: {error}",
            where=str(path),
            hint="copy or download it again",
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path.name} should hold a JSON object, found {type(values).__name__}",
            where=str(path),
            hint="copy or download it again",
        )
    return values
