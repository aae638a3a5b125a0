"""Batched writing equals one prompt at a time, and chats the verifier writes are usable."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from speculators_core.data import self_write as module
from speculators_core.data.chats import Chat
from speculators_core.data.domains import DOMAINS, Domain
from speculators_core.data.filters import Language
from speculators_core.data.layouts import recognise
from speculators_core.data.rows import read_rows
from speculators_core.data.self_write import self_write
from speculators_core.data.writer import Rows, _attend, greedy, nucleus, write
from speculators_core.errors import DataError, InputError, PairingError, Stopped
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import SelfWriteParams
from tests.core.listening import Listener


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return load_verifier(tiny_verifier)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain that even a random model can write: any six characters."""
    domain = Domain(
        system=None,
        opening=lambda rng: rng.choice("abcdef") + " ",
        stop=None,
        keep=lambda text: len(text) > 3,
    )
    monkeypatch.setitem(module.DOMAINS, "chat", domain)


def read_back(file: str) -> list[Chat]:
    found = [recognise(row.values, file) for row in read_rows(Path(file))]
    return [chat for chat in found if isinstance(chat, Chat)]


def params(verifier: Path, **changes: object) -> SelfWriteParams:
    values = {
        "verifier": str(verifier),
        "domain": "chat",
        "samples": 10,
        "held_out": 4,
        "max_prompt_tokens": 6,
        "max_answer_tokens": 8,
        "batch_size": 4,
    }
    return SelfWriteParams.model_validate({**values, **changes})


@torch.no_grad()
def alone(verifier: Verifier, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(verifier.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shared", [0, 5])
def test_a_batch_writes_what_each_prompt_gives_alone(verifier: Verifier, shared: int) -> None:
    rng = random.Random(1)
    head = [rng.randrange(200) for _ in range(shared)]
    prompts = [head + [rng.randrange(200) for _ in range(n)] for n in (3, 9, 1, 6)]
    written = write(verifier, prompts, 7, greedy, lambda ids: False)
    assert written == [alone(verifier, prompt, 7) for prompt in prompts]


def test_finished_rows_leave_and_the_others_go_on_undisturbed(verifier: Verifier) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    expected = [alone(verifier, prompt, 8) for prompt in prompts]
    stop = expected[1][2]
    written = write(verifier, prompts, 8, greedy, lambda ids: ids[-1] == stop)
    for got, full in zip(written, expected, strict=True):
        end = full.index(stop) + 1 if stop in full else 8
        assert got == full[:end]


def test_the_models_own_attention_is_back_afterwards(verifier: Verifier) -> None:
    before = verifier.model.config._attn_implementation
    with pytest.raises(ZeroDivisionError):
        write(verifier, [[1]], 3, greedy, lambda ids: bool(1 / 0))
    assert verifier.model.config._attn_implementation == before


def test_an_empty_prompt_is_refused_and_no_prompts_give_nothing(verifier: Verifier) -> None:
    with pytest.raises(InputError, match="empty prompt"):
        write(verifier, [[1], []], 3, greedy, lambda ids: False)
    assert write(verifier, [], 3, greedy, lambda ids: False) == []


def test_nucleus_sampling_draws_from_the_smallest_set_that_reaches_top_p() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    choose = nucleus(1.0, 0.75, torch.Generator().manual_seed(0))
    drawn = choose(p.log().expand(20_000, 4))
    shares = torch.bincount(drawn, minlength=4) / 20_000
    # 0.5 + 0.3 reach 0.75; renormalised 0.625 and 0.375; 6 sigma is 0.021
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.375, 0, 0]), atol=0.021, rtol=0)


def test_a_flat_distribution_is_sampled_over_the_whole_vocabulary() -> None:
    choose = nucleus(1.0, 0.95, torch.Generator().manual_seed(0))
    drawn = choose(torch.zeros(4000, 3000))
    assert len(drawn.unique()) > 1500  # of 2850: more than the 1024 that are looked at first


@pytest.mark.usefixtures("letters")
def test_chats_and_held_out_prompts_are_written_and_disjoint(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    listener = Listener()
    result = self_write(params(tiny_verifier), tmp_path / "out", listener)
    chats = read_back(result.output)
    held_out = [json.loads(line) for line in Path(result.held_out).read_text().splitlines()]
    questions = [chat.messages[0].content for chat in chats]
    assert len(held_out) == 4 and all(set(r) == {"prompt", "category"} for r in held_out)
    assert len(questions) == len(set(questions)) <= 10
    assert not {r["prompt"] for r in held_out} & set(questions)
    assert result.samples == len(chats) and result.tokens > 0
    assert listener.fractions == sorted(listener.fractions) and listener.fractions[-1] == 1.0


@pytest.mark.usefixtures("letters")
def test_the_same_seed_writes_the_same_chats(tmp_path: Path, tiny_verifier: Path) -> None:
    texts = []
    for seed in (3, 3, 4):
        out = tmp_path / str(len(texts))
        self_write(params(tiny_verifier, seed=seed), out)
        texts.append((out / "chats.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.usefixtures("letters")
def test_answers_are_the_verifiers_greedy_ones(
    tmp_path: Path, tiny_verifier: Path, verifier: Verifier
) -> None:
    result = self_write(params(tiny_verifier), tmp_path / "out")
    chat = read_back(result.output)[0]
    tokenizer = verifier.tokenizer
    prompt = tokenizer.apply_chat_template(
        chat.as_dicts()[:1], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    ids = alone(verifier, list(prompt), 8)
    special = set(tokenizer.all_special_ids)
    end = next((i for i, token in enumerate(ids) if token in special), 8)
    assert chat.messages[1].content == tokenizer.decode(ids[:end])


@pytest.mark.usefixtures("letters")
def test_stopping_leaves_nothing(tmp_path: Path, tiny_verifier: Path) -> None:
    with pytest.raises(Stopped):
        self_write(params(tiny_verifier), tmp_path / "out", Listener(lambda me: me.asked > 3))
    assert not list(tmp_path.iterdir())


def test_a_verifier_that_writes_no_usable_question_is_an_error(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    with pytest.raises(DataError, match="are usable"):
        self_write(params(tiny_verifier, domain="maths"), tmp_path / "out")


def test_maths_openings_are_seeded_and_various() -> None:
    domain = DOMAINS["maths"]
    first = [domain.opening(random.Random(0)) for _ in range(2)]
    many = {domain.opening(random.Random(seed)) for seed in range(300)}
    assert first[0] == first[1] and len(many) > 250
    assert domain.keep("Sam has 3 apples and eats one. How many are left?")
    assert not domain.keep("Sam has 3 apples.")


def test_a_verifier_without_a_chat_template_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_verifier, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        self_write(params(base), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_attention_with_more_than_keys_and_values_is_refused(verifier: Verifier) -> None:
    attention, some = verifier.layers[0].self_attn, torch.zeros(1, 2, 1, 4)
    with pytest.raises(PairingError, match="softcap"):
        _attend(attention, some, some, some, None, rows=Rows(verifier, 1, 1), softcap=30.0)


@pytest.mark.usefixtures("letters")
def test_what_is_dropped_is_counted_and_stored_with_the_seed(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    with pytest.raises(InputError, match="no language 'xx'"):
        self_write(params(tiny_verifier, language="xx"), tmp_path / "none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Language, "spoken_in", lambda self, text: False)
        with pytest.raises(DataError, match="are usable"):
            now = params(tiny_verifier, seed=5, language="ru", samples=1, held_out=0)
            self_write(now, tmp_path / "none")
    now = params(tiny_verifier, seed=5, min_answer_tokens=8)
    result = self_write(now, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "written.json").read_text())
    assert record["settings"]["seed"] == 5 and record["dropped"] == result.dropped
    lost = sum(n for reason, n in result.dropped.items() if "answer" in reason)
    assert result.samples + lost == 10 and lost > 0
    with pytest.raises(ValueError, match="above max_answer_tokens"):
        params(tiny_verifier, min_answer_tokens=9)
