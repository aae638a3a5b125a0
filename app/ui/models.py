"""Models: what the lab knows, speculators, verifiers and evaluations; how to bring more in, and how
to give a speculator away.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, urlencode

import gradio as gr

from app.services import evaluations, launching, references, speculators, verifiers
from app.services.views import EvaluationView, SpeculatorView, VerifierView
from app.ui import launch
from app.ui.choices import all_speculator_names, data_names, speculator_names, verifier_names
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, notice
from app.ui.conversion import deploy_link
from app.ui.job_form import JobForm
from app.ui.page import frame, keep_current
from speculators_core.hub.reference import is_hub_id
from speculators_core.params import ExportParams, JobKind, Params

IN_THE_LAB = (
    JobForm(
        JobKind.PULL,
        "pull",
        "Bring a model from the hub",
        "Bring",
        rows=(("repository", "revision", "name"),),
        choices={},
        about="A speculator, a verifier or a draft to convert. The download is a run with its size "
        "and progress, and goes on where it stopped. A gated model needs its terms accepted on its "
        "page of the hub, and HF_TOKEN of that account in the environment of the worker; without "
        "them the run says so.",
    ),
    JobForm(
        JobKind.VERIFIER,
        "bring",
        "Bring a verifier from a directory",
        "Bring",
        rows=(("source", "name"),),
        choices={},
    ),
    JobForm(
        JobKind.EVALUATE,
        "evaluate",
        "Evaluate a speculator",
        "Evaluate",
        rows=(
            ("speculator", "verifier", "data"),
            ("engine", "speculative_tokens", "max_tokens", "samples"),
        ),
        choices={
            "speculator": speculator_names,
            "verifier": verifier_names,
            "data": lambda: data_names("prompts", "chats"),
        },
    ),
)
ELSEWHERE = (
    JobForm(
        JobKind.EXPORT,
        "export",
        "Export a speculator for other tools",
        "Export",
        rows=(("speculator", "format", "verifier"),),
        choices={"speculator": all_speculator_names, "verifier": verifier_names},
        empty=("verifier",),
        about="What the layout has no words for is listed here and on the run's page; where its "
        "readers would draft something else, nothing is written unless you accept it.",
        needs=lambda params: losses_tree(params),
    ),
    JobForm(
        JobKind.PUSH,
        "push",
        "Push a speculator to the hub",
        "Push",
        rows=(("speculator", "repository"), ("verifier_name", "revision", "private")),
        choices={"speculator": all_speculator_names},
        about="HF_TOKEN is read from the environment of the worker; it is never asked for here.",
    ),
)


def losses_tree(params: Params) -> Node:
    """What an export would not hold, and whether it would be written."""
    assert isinstance(params, ExportParams)
    references.check_params(JobKind.EXPORT, params.model_dump(mode="json"))
    found = launching.losses(params)
    later = "Its verifier is on the hub: the run may find more." if _on_hub(params) else None
    serious = [one for one in found if one.serious]
    items = el("ul", (el("li", el("code", one.field), f": {one.meaning}") for one in found))
    if serious and not params.accept_losses:
        names = ", ".join(one.field for one in serious)
        text = f"It would not be written: its readers would draft something else ({names})."
        hint = "Choose another layout, or tick Accept losses under Advanced."
        return notice("warning", text, el("span", hint, cls="hint"), items, later or "")
    if not found:
        return notice("info", later) if later else el("div")
    return notice("info", "The layout does not hold:", items, later or "")


def _on_hub(params: ExportParams) -> bool:
    return bool(params.verifier) and is_hub_id(references.resolve(str(params.verifier), "verifier"))


def build(blocks: gr.Blocks) -> None:
    """The page at /models; `?form=KEY&speculator=NAME` opens a form for one."""
    with frame("Models") as navigation:
        Panel(el("h1", "Models"))
        known = Panel(elem_id="models")
        for form in IN_THE_LAB:
            form.draw(blocks)
        launch.draw(blocks)
        for form in ELSEWHERE:
            form.draw(blocks)
    keep_current(blocks, "Models", navigation, lambda request: [_known()], [known])


def _known() -> Node:
    return el(
        "div",
        _section("Speculators", speculators_table(speculators.list_speculators())),
        _section("Evaluations", evaluations_table(evaluations.list_evaluations()[:50])),
        _section("Verifiers", verifiers_table(verifiers.list_verifiers())),
        cls="stack",
    )


def _section(title: str, body: Node) -> Node:
    return el("section", el("h2", title), body, cls="stack", aria_label=title)


def speculators_table(found: Sequence[SpeculatorView]) -> Node:
    if not found:
        train, convert = el("a", "Train", href="/train"), el("a", "convert", href="/convert")
        return state.empty("No speculator yet. ", train, " one, or ", convert, " one you have.")
    rows = (
        (
            _origin(one.name, one.run_id),
            one.algorithm,
            _last(one.verifier),
            f"{one.draft_vocab_size:,}",
            str(one.speculative_tokens),
            _deployable(one),
            _elsewhere(one),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = [
        "Name",
        "Algorithm",
        "Verifier",
        "#Vocabulary",
        "#K",
        "Deploy",
        "Elsewhere",
        "Added",
    ]
    return state.table(headings, rows, label="Speculators")


def _deployable(one: SpeculatorView) -> Node:
    """The way to deploy it, who allowed it, or what stands in the way and where to decide."""
    if one.deployable:
        return deploy_link(one)
    reasons = "; ".join(one.obstacles)
    if one.servable:
        who = el("span", f"allowed by {one.allowed_by}", cls="quiet small", title=reasons)
        return el("span", deploy_link(one), " ", who)
    told = [state.chip("doubtful", reasons), el("span", reasons, cls="quiet small")]
    if one.run_id:
        told.append(el("a", "Decide", href=f"/runs?run={one.run_id}"))
    return el("span", told, cls="row")


def _elsewhere(one: SpeculatorView) -> Node:
    """The ways out of the lab."""
    query = urlencode({"speculator": one.name}, quote_via=quote)
    links = (
        el("a", word, href=f"/models?form={form}&{query}")
        for word, form in (("Commands", "launch"), ("Export", "export"), ("Push", "push"))
    )
    return el("span", links, cls="row")


def evaluations_table(found: Sequence[EvaluationView]) -> Node:
    if not found:
        return state.empty("Nothing has been evaluated yet.")
    rows = (
        (
            _origin(_last(one.speculator), one.run_id),
            _last(one.data),
            _last(one.engine),
            str(one.speculative_tokens),
            state.number(one.acceptance_length),
            state.number(100 * one.acceptance_rate, 0, " %"),
            state.number(one.tokens_per_second, 1),
            state.number(one.tokens_per_second_plain, 1),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = ["Speculator", "Data", "Engine", "#K", "#Acceptance length", "#Rate", "#Tokens/s"]
    return state.table([*headings, "#Plain tokens/s", "When"], rows, label="Evaluations")


def verifiers_table(found: Sequence[VerifierView]) -> Node:
    if not found:
        return state.empty("No verifier yet. The demo brings one; or bring your own below.")
    rows = (
        (
            _origin(one.name, one.run_id),
            one.architecture,
            str(one.num_layers),
            f"{one.hidden_size:,}",
            f"{one.vocab_size:,}",
            el("code", one.source),
        )
        for one in found
    )
    headings = ["Name", "Architecture", "#Layers", "#Hidden", "#Vocabulary", "Source"]
    return state.table(headings, rows, label="Verifiers")


def _origin(name: str, run_id: str | None) -> Node:
    return el("a", name, href=f"/runs?run={run_id}") if run_id else name


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
