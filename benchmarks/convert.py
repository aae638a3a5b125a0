"""Converting against copying the file, and against speculators 0.9.0: time and peak memory.

A made EAGLE-3 checkpoint of the research layout (float16 safetensors, an embedding of its own, the
shape of a draft for an 8B Llama): 2 GB, and one of 80 MB where starting counts most. Each side is
a process of its own, timed from its start to its end, validation off; speculators converts through
its Python function, the one its command calls. The copy is `shutil.copyfile` (sendfile) into the
same file system. Nobody calls fsync; the source is in the page cache (read once before), and dirty
pages are written out before each measurement. Sides take turns; medians count.

Memory is the peak of RssAnon in /proc, read every 2 ms: what a process holds apart from mapped
files and the page cache.

    python benchmarks/convert.py [--quick] [--json] [--directory DIR]

`time_over_copy` and `memory_over_file` are of the 2 GB file; `promise_kept` says whether time is at
most 1.5 copies and a second, and memory at most 0.3 of the file and 150 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculators_core.precision import SIZES, Raw
from speculators_core.weights import Pending, write_weights

MB = 1_000_000
THEIRS = (
    "import sys; from speculators.convert import convert_model; "
    "convert_model(sys.argv[1], sys.argv[2], 'eagle3', output_path=sys.argv[3])"
)


@dataclass(frozen=True)
class Shape:
    """A draft's sizes. Heads are 128 wide, a quarter as many for keys and values."""

    hidden: int
    inner: int
    vocab: int
    draft_vocab: int
    embedding: bool

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.hidden // 128,
            "num_key_value_heads": self.hidden // 512,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": self.vocab,
            "torch_dtype": "float16",
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        h, inner, few = self.hidden, self.inner, self.hidden // 4
        layer = {
            "self_attn.q_proj.weight": (h, 2 * h),
            "self_attn.k_proj.weight": (few, 2 * h),
            "self_attn.v_proj.weight": (few, 2 * h),
            "self_attn.o_proj.weight": (h, h),
            "mlp.gate_proj.weight": (inner, h),
            "mlp.up_proj.weight": (inner, h),
            "mlp.down_proj.weight": (h, inner),
            "hidden_norm.weight": (h,),
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
        }
        tensors = {f"midlayer.{name}": shape for name, shape in layer.items()}
        tensors |= {"fc.weight": (h, 3 * h), "norm.weight": (h,)}
        tensors |= {"lm_head.weight": (self.draft_vocab, h)}
        return tensors | ({"embed_tokens.weight": (self.vocab, h)} if self.embedding else {})


LARGE = Shape(4096, 16384, 128256, 32000, embedding=True)  # 2.0 GB
QUICK = Shape(2048, 5632, 64128, 16000, embedding=True)  # 0.5 GB
SMALL = Shape(1536, 2304, 49152, 8192, embedding=False)  # 80 MB


def make(shape: Shape, directory: Path) -> tuple[Path, Path]:
    """The checkpoint, and a verifier of which nobody reads more than the config."""
    checkpoint, verifier = directory / "checkpoint", directory / "verifier"
    for place, more in ((checkpoint, {"draft_vocab_size": shape.draft_vocab}), (verifier, {})):
        place.mkdir(parents=True)
        config = shape.config() | more
        if place is verifier:
            config["num_hidden_layers"] = 32
        (place / "config.json").write_text(json.dumps(config))
    kept = np.zeros(shape.vocab, np.bool_)
    kept[:: shape.vocab // shape.draft_vocab][: shape.draft_vocab] = True
    offsets = np.flatnonzero(kept) - np.arange(shape.draft_vocab)
    generator = np.random.default_rng(0)
    block = generator.standard_normal(1 << 22, np.float32).astype(np.float16).view(np.uint8)
    tensors = [
        Pending(n, s, "float16", lambda s=s: fill(s, block)) for n, s in shape.shapes().items()
    ]
    tensors += [Pending("t2d", kept.shape, "bool", lambda: [kept.view(np.uint8)])]
    tensors += [Pending("d2t", offsets.shape, "int64", lambda: [offsets.view(np.uint8)])]
    list(write_weights(checkpoint, tensors))
    return checkpoint, verifier


def fill(shape: tuple[int, ...], block: Raw) -> Iterator[Raw]:
    left = int(np.prod(shape)) * SIZES["float16"]
    while left:
        yield block[:left]
        left -= min(left, block.size)


def copy(checkpoint: Path, verifier: Path, output: Path) -> tuple[float, float]:
    began = time.perf_counter()
    output.mkdir()
    shutil.copyfile(checkpoint / "model.safetensors", output / "model.safetensors")
    return time.perf_counter() - began, 0.0


def ours(checkpoint: Path, verifier: Path, output: Path) -> tuple[float, float]:
    params = {"checkpoint": str(checkpoint), "verifier": str(verifier)}
    request = {"params": {**params, "validate_on_verifier": False}, "output": str(output)}
    return watch([sys.executable, "-m", "speculators_core", "convert"], json.dumps(request))


def theirs(checkpoint: Path, verifier: Path, output: Path) -> tuple[float, float]:
    return watch([sys.executable, "-c", THEIRS, str(checkpoint), str(verifier), str(output)], "")


SIDES = {"copy": copy, "ours": ours, "theirs": theirs}


def watch(command: list[str], request: str) -> tuple[float, float]:
    """Seconds, and the peak of RssAnon in MB."""
    with tempfile.TemporaryFile("w+") as said:
        peak, began = 0, time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, text=True
        )
        assert process.stdin
        process.stdin.write(request)
        process.stdin.close()
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.002)
        seconds = time.perf_counter() - began
        said.seek(0)
        if process.returncode:
            raise SystemExit(f"{command[:4]} failed:\n{said.read()[-3000:]}")
    return seconds, peak / 1000


def anonymous(pid: int) -> int:
    """Bytes of a process that belong to no file, in thousands."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
    return int(found[0]) * 1024 // 1000 if found else 0


def compare(shape: Shape, directory: Path, rounds: int, their_rounds: int) -> dict[str, Any]:
    checkpoint, verifier = make(shape, directory)
    size = (checkpoint / "model.safetensors").stat().st_size
    (checkpoint / "model.safetensors").read_bytes()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    memory = dict.fromkeys(SIDES, 0.0)
    for round_ in range(rounds):
        for side, run in SIDES.items():
            if side == "theirs" and round_ >= their_rounds:
                continue
            os.sync()
            spent, held = run(checkpoint, verifier, directory / "out")
            shutil.rmtree(directory / "out")
            seconds[side].append(spent)
            memory[side] = max(memory[side], held)
    median = {side: statistics.median(spent) for side, spent in seconds.items()}
    kept = median["ours"] <= 1.5 * median["copy"] + 1 and memory["ours"] <= 0.3 * size / MB + 150
    return {
        "time_over_copy": median["ours"] / median["copy"],
        "time_less_one_second_over_copy": (median["ours"] - 1) / median["copy"],
        "time_over_speculators": median["ours"] / median["theirs"],
        "memory_over_file": memory["ours"] / (size / MB),
        "memory_over_file_speculators": memory["theirs"] / (size / MB),
        "promise_kept": kept,
        "file_mb": size / MB,
        "seconds": seconds,
        "memory_mb": {side: memory[side] for side in ("ours", "theirs")},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="0.5 GB; within 60 s on two cores")
    parser.add_argument("--directory", type=Path, help="where files are made (default: temporary)")
    args = parser.parse_args()
    rounds, their_rounds = (2, 1) if args.quick else (5, 2)
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        small = compare(SMALL, Path(place, "small"), rounds, 1)
        result = compare(QUICK if args.quick else LARGE, Path(place, "large"), rounds, their_rounds)
    result["small"] = small
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
