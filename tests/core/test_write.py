"""Tensors go from file to file: in little memory, without torch, in the precision and the files
that were asked for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.checkpoint import load_speculator
from speculators_core.config import Eagle3Config
from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect
from speculators_core.errors import CheckpointError, Forbidden
from speculators_core.params import ConvertParams
from tests import tiny


def params(checkpoint, verifier, **more):
    named = {"checkpoint": str(checkpoint), "verifier": str(verifier)}
    return ConvertParams(**named, validate_on_verifier=False, **more)


@pytest.fixture(scope="module")
def research(tmp_path_factory, tiny_verifier):
    place = tmp_path_factory.mktemp("write") / "research"
    return tiny.build_research(place, tiny_verifier, safetensors=True, embedding=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, research, tiny_verifier):
    """The research checkpoint as one file, in its own precision: the directory and its tensors."""
    output = tmp_path_factory.mktemp("write") / "whole"
    convert(params(research, tiny_verifier), output)
    return output, load_file(output / "model.safetensors")


def in_a_process(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_converting_without_validation_costs_no_torch(tmp_path, research, tiny_verifier):
    script = (
        "import sys; from speculators_core.conversion.convert import convert; "
        "from speculators_core.params import ConvertParams as P; "
        "p = P(checkpoint=sys.argv[1], verifier=sys.argv[2], validate_on_verifier=False); "
        "convert(p, sys.argv[3]); "
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = in_a_process(script, research, tiny_verifier, tmp_path / "out")
    assert done.stdout.strip() == "[]", done.stderr


def test_a_large_tensor_is_never_held_whole(tmp_path, research, tiny_verifier):
    """256 MB of embedding (a file with a hole) pass through a process that may hold 128 MB."""
    wide = json.loads((tiny_verifier / "config.json").read_text())
    tokens = (256 << 20) // (2 * tiny.HIDDEN)
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "config.json").write_text(json.dumps(wide | {"vocab_size": tokens}))
    large = shutil.copytree(research, tmp_path / "large")
    tensors = load_file(large / "model.safetensors")
    flags = torch.zeros(tokens, dtype=torch.bool)
    flags[: len(tensors["t2d"])] = tensors["t2d"]
    sparse_checkpoint(large, tensors | {"t2d": flags}, tokens)
    script = (
        "import resource, sys; from speculators_core.conversion.convert import convert; "
        "from speculators_core.params import ConvertParams as P; "
        "held = int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize(); "
        "resource.setrlimit(resource.RLIMIT_DATA, (held + (128 << 20),) * 2); "
        "p = P(checkpoint=sys.argv[1], verifier=sys.argv[2], validate_on_verifier=False); "
        "print(convert(p, sys.argv[3]).output)"
    )
    done = in_a_process(script, large, tmp_path / "v", tmp_path / "out")
    assert done.stdout.strip() == str(tmp_path / "out"), done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 256 << 20


def sparse_checkpoint(directory, tensors, tokens):
    """The tensors, and at the file's end an embedding of zeros that takes no place on disk."""
    save_file({n: t for n, t in tensors.items() if n != "embed_tokens.weight"}, directory / "x")
    content = (directory / "x").read_bytes()
    (directory / "x").unlink()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    size = 2 * tiny.HIDDEN * tokens
    header["embed_tokens.weight"] = {
        "dtype": "F16",
        "shape": [tokens, tiny.HIDDEN],
        "data_offsets": [end, end + size],
    }
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": tokens}))
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + content[8 + length :])
        file.truncate(8 + len(text) + end + size)


def test_precision_is_kept_unless_another_is_asked_for(tmp_path, research, tiny_verifier, whole):
    assert {t.dtype for t in whole[1].values()} == {torch.float16, torch.int64, torch.bool}
    for name in ("float32", "bfloat16"):
        convert(params(research, tiny_verifier, dtype=name), tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        for tensor, value in whole[1].items():
            expected = value.to(getattr(torch, name)) if value.is_floating_point() else value
            assert written[tensor].dtype == expected.dtype, tensor
            assert torch.equal(written[tensor], expected), tensor
        assert Eagle3Config.load(tmp_path / name).dtype == name
        report = json.loads((tmp_path / name / "conversion_report.json").read_text())
        assert report["config"]["dtype"] == {"value": name, "origin": "parameter"}
        rows = {row["target"]: row for row in report["tensors"]}
        assert rows["fc.weight"]["dtype"] == name
        assert f"written as {name}" in rows["fc.weight"]["reason"]


def test_shards_hold_what_one_file_does_and_load(tmp_path, research, tiny_verifier, whole):
    tensors = load_file(research / "model.safetensors")
    large = tmp_path / "research"
    shutil.copytree(research, large)
    tensors["embed_tokens.weight"] = torch.ones(16384, tiny.HIDDEN).half()  # 2 MB
    tensors["t2d"] = torch.cat([tensors["t2d"], torch.zeros(16384 - 256, dtype=torch.bool)])
    save_file(tensors, large / "model.safetensors")
    config = json.loads((large / "config.json").read_text()) | {"vocab_size": 16384}
    (large / "config.json").write_text(json.dumps(config))
    (tmp_path / "v").mkdir()
    wide = json.loads((tiny_verifier / "config.json").read_text()) | {"vocab_size": 16384}
    (tmp_path / "v" / "config.json").write_text(json.dumps(wide))
    convert(params(large, tmp_path / "v", max_shard_size=1), tmp_path / "sharded")
    convert(params(large, tmp_path / "v"), tmp_path / "single")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 1
    ours, theirs = (load_speculator(tmp_path / d).state_dict() for d in ("sharded", "single"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = convert(params(tmp_path / "sharded", tmp_path / "v"), tmp_path / "again")
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "single" / file).read_bytes()
    assert again.output == str(tmp_path / "again")


@pytest.fixture
def sharded(research, tmp_path):
    """The research checkpoint in two shards; called with a change to index and shards."""

    def build(change=lambda places, shards: None):
        copy = shutil.copytree(research, tmp_path / "sharded")
        tensors = load_file(copy / "model.safetensors")
        (copy / "model.safetensors").unlink()
        names = ("a.safetensors", "b.safetensors")
        places = {name: names[i % 2] for i, name in enumerate(tensors)}
        shards = {f: {n: tensors[n] for n in tensors if places[n] == f} for f in names}
        change(places, shards)
        for file, part in shards.items():
            save_file(part, copy / file)
        index = {"metadata": {}, "weight_map": places}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        return copy

    return build


def test_shards_in_give_the_same_file(tmp_path, sharded, tiny_verifier, whole):
    convert(params(sharded(), tiny_verifier), tmp_path / "out")
    file = "model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (whole[0] / file).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, s: s["b.safetensors"].update(s["a.safetensors"]), "is in a.* and in b"),
        (lambda p, s: p.update({"fc.bias": "a.safetensors"}), r"says that fc\.bias is in a"),
        (lambda p, s: p.update(dict.fromkeys(p, "a.safetensors")), "where it is not"),
        (lambda p, s: p.update({"fc.weight": "c.safetensors"}), "which is not here"),
        (lambda p, s: p.update({"fc.weight": "../sharded/a.safetensors"}), "which is not here"),
    ],
)
def test_an_index_that_lies_is_refused(sharded, change, message):
    with pytest.raises(CheckpointError, match=message):
        inspect(sharded(change))


def damaged(research, directory, change):
    copy = shutil.copytree(research, directory)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fc.weight", torch.int8), ("fc.weight", torch.float8_e4m3fn), ("d2t", torch.float32)],
)
def test_numbers_of_another_kind_are_not_taken_for_weights(
    tmp_path, research, tiny_verifier, name, dtype
):
    bad = damaged(research, tmp_path / "bad", lambda t: t.update({name: t[name].float().to(dtype)}))
    with pytest.raises(CheckpointError, match=f"{name} holds"):
        convert(params(bad, tiny_verifier), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_value_that_is_no_number_is_found_whether_it_is_copied_or_cast(
    tmp_path, research, tiny_verifier, dtype
):
    def spoil(tensors):
        tensors["lm_head.weight"][-1, -1] = float("nan")

    bad = damaged(research, tmp_path / "bad", spoil)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds NaN or infinity"):
        convert(params(bad, tiny_verifier, dtype=dtype), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_stay_within_the_roots(tmp_path, research, tiny_verifier):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    copy = shutil.copytree(research, inside / "c")
    verifier = shutil.copytree(tiny_verifier, inside / "v")
    (copy / "model.safetensors").rename(inside / "blob")
    (copy / "model.safetensors").symlink_to("../blob")
    convert(params(copy, verifier), tmp_path / "out", roots=[inside])
    outside.mkdir()
    for directory, name in ((copy, "config.json"), (verifier, "tokenizer.json")):
        (directory / name).rename(outside / name)
        (directory / name).symlink_to(outside / name)
        inspect(copy, verifier)
        with pytest.raises(Forbidden, match=f"{name} is a link to"):
            inspect(copy, verifier, roots=[inside])
        with pytest.raises(Forbidden, match=f"{name} is a link to"):
            convert(params(copy, verifier), tmp_path / "out2", roots=[inside])
        (directory / name).unlink()
        (outside / name).rename(directory / name)
    assert not (tmp_path / "out2").exists()
