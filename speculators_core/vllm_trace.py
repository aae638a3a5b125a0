"""The scheduler class that runs inside vLLM: it writes the trace, and lets a request opt out.

vLLM 0.32 loads `make_scheduler` through `--scheduler-cls` and calls it with the keywords of its own
scheduler. Three things are added to that scheduler:

- where `SPECLAB_TRACE_SOCKET` is set, every decoding step goes out as trace events
  (docs/architecture.md, "Trace"); without it the class has no hook for them at all;
- a request with `vllm_xargs: {"speculate": "0"}` is decoded plainly on the same server;
- the engine ends with the server that started it, also when that one is killed.

Draft ids are real where scheduling is synchronous and the V1 model runner is used. Otherwise vLLM
shows the scheduler placeholders (-1): the ids of accepted drafts are then taken from what was
sampled, those of rejected drafts stay -1 and only their count means something.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from speculators_core.decode.detokenize import PROMPT_WINDOW
from speculators_core.trace import TraceWriter

OPT_OUT = "speculate"  # the vllm_xargs key; "0" decodes plainly
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("vllm.speclab.trace")  # below vLLM's own, whose handlers show it


class Seen(NamedTuple):
    """What a step gave a request, copied before vLLM trims the lists in place."""

    drafted: list[int]
    sampled: list[int]  # accepted drafts, then the verifier's own token
    context_len: int  # prompt and answer tokens before the step

    @property
    def accepted(self) -> int:
        """By vLLM's own rule, so that sums equal its counters."""
        return max(len(self.sampled) - 1, 0) if self.drafted else 0

    @property
    def drafted_ids(self) -> list[int]:
        """Placeholders of accepted drafts replaced by what they turned out to be."""
        known = self.sampled[: self.accepted]
        return known + self.drafted[len(known) :]


def make_scheduler(**keywords: Any) -> Any:
    """A vLLM scheduler of the kind that this server's configuration needs.

    A plain `Scheduler` under asynchronous scheduling would silently end speculation.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    end_with_server()
    asynchronous = keywords["vllm_config"].scheduler_config.async_scheduling
    kind: type[Any] = opting_out(AsyncScheduler if asynchronous else Scheduler)
    writer = TraceWriter.from_environment()
    if writer is not None:
        kind = tracing(kind, writer)
    logger.info(
        "speclab scheduler: %s, trace %s",
        "asynchronous" if asynchronous else "synchronous",
        f"to {writer.path}" if writer is not None else "off",
    )
    return kind(**keywords)


def end_with_server() -> None:
    """vLLM's engine outlives a server process that is killed; this one is killed with it."""
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def wants_plain(request: Any) -> bool:
    """Whether the request asked to be decoded without speculation."""
    sampling = request.sampling_params
    extra = sampling.extra_args if sampling is not None else None
    return extra is not None and str(extra.get(OPT_OUT)) == "0"


def opting_out(base: type[Any]) -> type[Any]:
    """`base`, scheduling no drafts for the requests that want none."""

    class PlainOnRequest(base):  # type: ignore[misc]
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            speculative = self.vllm_config.speculative_config
            # n-gram drafting costs nothing; an asynchronous worker drafts on its own account
            self._can_spare = (
                speculative is not None
                and speculative.method != "ngram"
                and not self.scheduler_config.async_scheduling
            )

        def schedule(self, *arguments: Any, **keywords: Any) -> Any:
            for request in self.running:
                if request.spec_token_ids and wants_plain(request):
                    request.spec_token_ids = []
            output = super().schedule(*arguments, **keywords)
            requests = [self.requests[rid] for rid in output.num_scheduled_tokens]
            if self._can_spare and all(map(wants_plain, requests)):
                # nobody speculates: the drafter runs once, to keep its cache in step
                output.num_spec_tokens_to_schedule = 0
            return output

    return PlainOnRequest


def tracing(base: type[Any], writer: TraceWriter) -> type[Any]:
    """`base`, writing `start`, `step` and `end` events as requests move through it."""

    class Tracing(base):  # type: ignore[misc]
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            self._steps: dict[str, int] = {}  # steps written, by request
            self._ended: list[Any] | None = None  # a list while a step is being taken in

        def add_request(self, request: Any) -> None:
            new = request.request_id not in self.requests
            super().add_request(request)
            if new:
                self._steps[request.request_id] = 0
                writer.write(start_event(request, self.num_spec_tokens))

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            seen = dict(look(self.requests, scheduler_output, model_runner_output))
            self._ended = []
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            for client in outputs.values():
                for output in client.outputs:
                    if output.new_token_ids and output.request_id in seen:
                        self._write_step(output, seen[output.request_id])
            ended, self._ended = self._ended, None
            for request in ended:
                self._write_end(request)
            return outputs

        def _free_request(self, request: Any, *arguments: Any, **keywords: Any) -> Any:
            result = super()._free_request(request, *arguments, **keywords)
            if self._ended is None:  # aborted between steps
                self._write_end(request)
            else:  # its last step is yet to be written
                self._ended.append(request)
            return result

        def _write_step(self, output: Any, seen: Seen) -> None:
            step = self._steps.get(output.request_id, 0)
            self._steps[output.request_id] = step + 1
            writer.write(step_event(output.request_id, step, seen, output.new_token_ids))

        def _write_end(self, request: Any) -> None:
            self._steps.pop(request.request_id, None)
            writer.write(end_event(request))

    return Tracing


def look(requests: dict[str, Any], scheduled: Any, computed: Any) -> Iterator[tuple[str, Seen]]:
    """The live requests that a step sampled for; those aborted in flight vLLM skips too."""
    for rid in scheduled.num_scheduled_tokens if computed.sampled_token_ids else ():
        request = requests.get(rid)
        if request is not None and not request.is_finished():
            drafted = scheduled.scheduled_spec_decode_tokens.get(rid, ())
            sampled = computed.sampled_token_ids[computed.req_id_to_index[rid]]
            yield rid, Seen(list(drafted), list(sampled), request.num_tokens)


def start_event(request: Any, k: int) -> dict[str, Any]:
    return {
        "ev": "start",
        "rid": request.request_id,
        "t": time.time(),
        "k": 0 if wants_plain(request) else k,
        "prompt_tokens": request.num_prompt_tokens,
        "prompt_tail": list((request.prompt_token_ids or [])[-PROMPT_WINDOW:]),
    }


def step_event(rid: str, step: int, seen: Seen, emitted: list[int]) -> dict[str, Any]:
    """vLLM tells neither probabilities nor the time of drafting and verifying."""
    return {
        "ev": "step",
        "rid": rid,
        "step": step,
        "t": time.time(),
        "drafted": seen.drafted_ids,
        "accepted": seen.accepted,
        "emitted": list(emitted),
        "context_len": seen.context_len,
        "p_draft": None,
        "p_verifier": None,
        "draft_ms": None,
        "verify_ms": None,
    }


def end_event(request: Any) -> dict[str, Any]:
    reason = request.get_finished_reason()
    return {
        "ev": "end",
        "rid": request.request_id,
        "t": time.time(),
        "status": "abort" if reason is None else str(reason),
    }
