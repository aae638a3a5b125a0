"""Chats of random letters for tiny models, and their prepared form."""

from __future__ import annotations

import json
import random
from pathlib import Path

from speculators_core.data.prepare import prepare
from speculators_core.params import PrepareParams


def write_chats(file: Path, count: int = 40, seed: int = 0) -> Path:
    """Chats of one or two turns, answers of 10 to 60 letters."""
    rng = random.Random(seed)
    with file.open("w") as lines:
        for _ in range(count):
            messages = []
            for _ in range(rng.randint(1, 2)):
                answer = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(10, 60)))
                messages += [
                    {"role": "user", "content": f"say {answer[:4]}"},
                    {"role": "assistant", "content": answer.strip() or "a"},
                ]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


def prepare_chats(folder: Path, verifier: Path, *, count: int = 40, **changes: object) -> Path:
    """A prepared data set in `folder`/prepared."""
    data = write_chats(folder / "chats.jsonl", count)
    values = {"data": (str(data),), "verifier": str(verifier), "draft_vocab_size": 64}
    prepare(PrepareParams.model_validate({**values, **changes}), folder / "prepared")
    return folder / "prepared"
