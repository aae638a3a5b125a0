"""A prepared data set looked at without torch: its facts, and single samples."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from speculators_core.data.prepare import load_prepared
from speculators_core.data.samples import read_facts, read_sample, validation_samples
from speculators_core.errors import DataError, NotFound
from speculators_core.weights import Pending, write_safetensors
from tests.core.small_data import prepare_chats


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    return prepare_chats(folder, tiny_verifier, count=12, validation_fraction=0.2)


def test_facts_are_those_of_the_data(place: Path, tiny_verifier: Path) -> None:
    facts, prepared = read_facts(place), load_prepared(place)
    assert (facts.samples, facts.tokens) == (12, len(prepared.ids))
    assert facts.trained_tokens == int(prepared.mask.sum())
    assert 0 < facts.trained_share < 1
    assert sum(count for _, count in facts.length_histogram) == 12
    assert facts.length_histogram[-1][0] >= int(prepared.lengths.max())
    assert facts.verifier == str(tiny_verifier) and facts.key == prepared.meta.key
    source = facts.sources[0]
    assert (source.path, source.weight) == (str(place.parent / "chats.jsonl"), 1.0)
    assert (source.rows, source.samples) == (12, 12)
    assert facts.enable_thinking is None and "generation blocks" in facts.masked_by
    assert facts.validation_samples == len(validation_samples(place)) == 3


def test_a_sample_shows_its_tokens_texts_and_mask(place: Path) -> None:
    prepared = load_prepared(place)
    for number in (0, 5, 11):
        sample, (ids, mask) = read_sample(place, number), prepared.document(number)
        assert [t.id for t in sample.tokens] == ids.tolist()
        assert [t.trained for t in sample.tokens] == mask.tolist()
        assert sample.source == f"{place.parent / 'chats.jsonl'}:{number + 1}"
        assert sample.validation is bool(prepared.validation[number])
        line = (place.parent / "chats.jsonl").read_text().splitlines()[number]
        said = "".join(t.text for t in sample.tokens if t.trained)
        answers = [m for m in json.loads(line)["messages"] if m["role"] == "assistant"]
        assert said == "".join(m["content"] + "<|im_end|>" for m in answers)


def test_a_sample_that_is_not_there_and_data_that_are_none_say_so(
    place: Path, tmp_path: Path
) -> None:
    for number in (12, -1):
        with pytest.raises(NotFound, match=f"no sample {number}"):
            read_sample(place, number)
    with pytest.raises(DataError, match="not a prepared data set"):
        read_facts(tmp_path)


def test_one_sample_of_a_million_takes_milliseconds(place: Path, tmp_path: Path) -> None:
    count = 1_000_000
    columns = {
        "ids": np.arange(2 * count, dtype=np.int32) % 200,
        "mask": np.tile(np.array([False, True]), count),
        "lengths": np.full(count, 2, dtype=np.int64),
        "validation": np.zeros(count, dtype=np.bool_),
        "source": np.zeros(count, dtype=np.int32),
        "row": np.arange(1, count + 1, dtype=np.int64),
    }
    pending = [
        Pending(name, a.shape, str(a.dtype), lambda a=a: [a.view(np.uint8)])  # type: ignore[misc]
        for name, a in columns.items()
    ]
    list(write_safetensors(tmp_path / "tokens.safetensors", pending))
    meta = json.loads((place / "meta.json").read_text())
    meta |= {"samples": count, "tokens": 2 * count, "masked_tokens": count}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "texts.json").write_text((place / "texts.json").read_text())
    taken = []
    for number in (999_999, 500_000, 0):
        began = time.monotonic()
        sample = read_sample(tmp_path, number)
        taken.append(time.monotonic() - began)
        assert sample.source.endswith(f":{number + 1}") and len(sample.tokens) == 2
    assert min(taken) < 0.1


def test_looking_at_samples_imports_neither_torch_nor_a_tokenizer(place: Path) -> None:
    code = (
        "import sys\nfrom speculators_core.data.samples import read_facts, read_sample\n"
        f"read_facts({str(place)!r}), read_sample({str(place)!r}, 3)\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
