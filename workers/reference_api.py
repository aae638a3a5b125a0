"""Request bodies of the reference server: the part of OpenAI's API, and of vLLM's additions to
it, that the reference engine can honour. Any other field is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from speculators_core.data.chats import messages_of
from speculators_core.errors import DataError, InputError
from speculators_core.params import SamplingParams


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Body(BaseModel):
    """What both routes take. A field given as null counts as not given."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    return_token_ids: bool = False
    request_id: str | None = None
    user: str | None = None
    vllm_xargs: dict[Literal["speculate", "trace"], str | int] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @property
    def plain(self) -> bool:
        """Whether this request opts out of speculation."""
        return str(self.vllm_xargs.get("speculate")) == "0"

    def sampling(self, defaults: dict[str, Any], room: int) -> SamplingParams:
        """Where the request is silent the verifier's generation config speaks, as in vLLM."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        chosen = defaults | {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            temperature=chosen.get("temperature", 1.0),
            top_p=chosen.get("top_p", 1.0),
            top_k=max(chosen.get("top_k", 0), 0),  # vLLM writes "all" as 0 or -1
            max_tokens=min(self.max_tokens or room, room),
            seed=self.seed,
        )


class ChatBody(Body):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    def turns(self) -> list[dict[str, Any]]:
        """Roles, text and what else a template renders. Raises `InputError` for what is neither."""
        try:
            messages = messages_of(self.messages, "messages")
        except DataError as error:
            raise InputError(error.message, where=error.where) from error
        return [message.as_dict() for message in messages]


class CompletionBody(Body):
    """POST /v1/completions: a text, or its tokens."""

    prompt: str | list[int]
