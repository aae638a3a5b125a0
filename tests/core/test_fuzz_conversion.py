"""Whatever a checkpoint holds, converting it ends in a result or in one of our errors.

Each example damages a sound checkpoint in one to three ways and converts it: within a second of
computing, without a traceback, without running anything, without an output directory where it
failed, and with bounded memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import struct
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect
from speculators_core.conversion.pickled import load_pickled
from speculators_core.errors import CheckpointError, Forbidden, SpeclabError
from speculators_core.params import ConvertParams
from tests.core import layouts
from tests.core.layouts import AFTER, OUTPUT, families

MISSED = (KeyError, IndexError, AttributeError, TypeError, ValueError)
"""What a damage meets where an earlier one took away what it damages."""
SECONDS = 1.0
GROWTH_MB = 400
KEPT = {"config.json", "model.safetensors", "conversion_report.json", "README.md"}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 300),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["float16", "llama", "eagle3", "/etc/passwd", "../../x", "\x00", "{{7*7}}"]),
)
nonsense = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
numbers = st.one_of(st.integers(-3, 600), st.sampled_from([2**31, 2**62, 2**63, 10**30]), scalars)


@dataclass
class Checkpoint:
    """A sound checkpoint in memory, to be damaged, then laid down."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    verifier: dict[str, Any]
    theirs: bytes
    config_text: bytes | None = None
    header: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes | None = None
    odd_files: dict[str, str] = field(default_factory=dict)
    shards: dict[str, Any] | None = None

    def open_header(self) -> dict[str, Any]:
        if not self.header:
            content = save(self.tensors)
            (length,) = struct.unpack("<Q", content[:8])
            self.header, self.body = json.loads(content[8 : 8 + length]), content[8 + length :]
        return self.header

    def weights(self) -> bytes:
        if self.raw is not None:
            return self.raw
        if not self.header:
            return save(self.tensors)
        text = json.dumps(self.header).encode()
        return struct.pack("<Q", len(text)) + text + self.body

    def lay_down(self, place: Path) -> None:
        text = self.config_text or json.dumps(self.config).encode()
        (place / "c").mkdir()
        (place / "c" / "config.json").write_bytes(text)
        (place / "c" / "model.safetensors").write_bytes(self.weights())
        (place / "v").mkdir()
        (place / "v" / "config.json").write_text(json.dumps(self.verifier))
        if self.theirs:
            (place / "v" / "model.safetensors").write_bytes(self.theirs)
        if self.shards is not None:
            (place / "c" / "model.safetensors").rename(place / "c" / "a.safetensors")
            index = json.dumps({"weight_map": self.shards})
            (place / "c" / "model.safetensors.index.json").write_text(index)
        for name, kind in self.odd_files.items():
            odd(place / "c" / name, kind)


def odd(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)
        case "outside":
            path.symlink_to("/etc/passwd")
        case "empty":
            path.touch()


# each of these damages one thing


def cut(draw, c):
    content = c.weights()
    c.raw = content[: draw(st.integers(0, len(content)))]


def flip(draw, c):
    content = bytearray(c.weights())
    for _ in range(draw(st.integers(1, 6))):
        where = draw(
            st.integers(0, min(len(content), draw(st.sampled_from([16, 3000, 10**6]))) - 1)
        )
        content[where] = draw(st.integers(0, 255))
    c.raw = bytes(content)


def misdeclare(draw, c):
    header = c.open_header()
    entry = header[draw(st.sampled_from(sorted(header)))]
    name = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
    entry[name] = draw(
        st.one_of(
            st.lists(numbers, max_size=4),
            st.sampled_from(["F64", "F16", "I8", "F8_E4M3", "BOOL", "Q4", "U64"]),
            nonsense,
        )
    )


def rename(draw, c):
    header = c.open_header()
    old = draw(st.sampled_from(sorted(header)))
    new = draw(st.sampled_from([*sorted(header), "layers.0.x", "model.fc.weight"]) | st.text())
    header[new] = header.pop(old)


def repeat(draw, c):
    text = json.dumps(c.open_header()).encode()
    name = draw(st.sampled_from(sorted(c.header)))
    again = json.dumps({name: c.header[name]}).encode()
    text = text[:-1] + b"," + again[1:]
    c.raw = struct.pack("<Q", len(text)) + text + c.body


def swell(draw, c):
    text = draw(
        st.sampled_from(
            [b" " * 20_000_000, b"[" * 100_000, b'{"a":' * 50_000, b"[" + b"[]," * 400_000 + b"[]]",
             b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
             b'{"' + b"a" * 1_000_000 + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}']
        )
    )  # fmt: skip
    if draw(st.booleans()):
        c.config_text = text
    else:
        length = draw(st.sampled_from([len(text), 2**63, 2**40]))
        c.raw = struct.pack("<Q", length) + text + b"1234"


def spoil(draw, c):
    name = draw(st.sampled_from(sorted(n for n, t in c.tensors.items() if t.is_floating_point())))
    c.tensors[name] = c.tensors[name].clone()
    values = c.tensors[name].view(-1)
    bad = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    values[draw(st.integers(0, len(values) - 1))] = bad


def reshape(draw, c):
    name = draw(st.sampled_from(sorted(c.tensors)))
    shape = draw(st.lists(st.integers(0, 65), max_size=3))
    dtype = draw(
        st.sampled_from([torch.float16, torch.float32, torch.int8, torch.int64, torch.bool])
    )
    c.tensors[name] = torch.zeros(shape, dtype=dtype)


def remap(draw, c):
    name = draw(st.sampled_from(["d2t", "t2d"]))
    drawn = np.random.default_rng(draw(st.integers(0, 9))).integers(
        -300, 300, c.tensors[name].shape
    )
    c.tensors[name] = torch.from_numpy(drawn).to(c.tensors[name].dtype)


def lose(draw, c):
    del c.tensors[draw(st.sampled_from(sorted(c.tensors)))]


def reconfigure(draw, c):
    config = draw(st.sampled_from([c.config, c.verifier]))
    name = draw(st.sampled_from(sorted(config)) | st.text(max_size=8))
    config[name] = draw(nonsense)


def unconfigure(draw, c):
    config = draw(st.sampled_from([c.config, c.verifier]))
    config.pop(draw(st.sampled_from(sorted(config))))


def nest(draw, c):
    config = draw(st.sampled_from([c.config, c.verifier]))
    inner = dict(config)
    for _ in range(draw(st.sampled_from([1, 2, 90, 300]))):
        inner = {"text_config": inner}
    config.clear()
    config.update(inner)


def retell(draw, c):
    text = json.dumps(c.config).encode()
    c.config_text = draw(
        st.sampled_from(
            [text[:-5], text + b"}", b"\xff\xfe" + text, b"null", b"[]", b"", b'"\\ud800"',
             text[:-1] + b',"vocab_size":1}', text.replace(b"llama", b"\\ud800"), b"NaN"]
        )
        | st.binary(max_size=40)
    )  # fmt: skip


def misplace(draw, c):
    kind = draw(st.sampled_from(["fifo", "directory", "device", "loop", "outside", "empty"]))
    c.odd_files[draw(st.sampled_from(["config.json", "model.safetensors"]))] = kind


def scatter(draw, c):
    places: dict[str, Any] = dict.fromkeys(c.tensors, "a.safetensors")
    file = draw(
        st.sampled_from(["../c/a.safetensors", "/etc/passwd", "b.safetensors", "x" * 5000, ""])
    )
    places[draw(st.sampled_from(sorted(places)) | st.text(max_size=8))] = draw(
        st.just(file) | nonsense
    )
    c.shards = places


DAMAGES = [cut, flip, misdeclare, rename, repeat, swell, spoil, reshape, remap, lose, reconfigure,
           unconfigure, nest, retell, misplace, scatter]  # fmt: skip


@dataclass(frozen=True)
class Sound:
    """A checkpoint that converts, and its verifier: its config, and what weights it has."""

    layout: str
    config: str
    tensors: dict[str, torch.Tensor] = field(repr=False)
    verifier: str = field(repr=False)
    theirs: bytes = field(repr=False)

    @classmethod
    def read(cls, layout: str, directory: Path, verifier: Path) -> Sound:
        config, theirs = ((d / "config.json").read_text() for d in (directory, verifier))
        weights = verifier / "model.safetensors"
        held = weights.read_bytes() if weights.exists() else b""
        return cls(layout, config, load_file(directory / "model.safetensors"), theirs, held)

    def copy(self) -> Checkpoint:
        config, verifier = json.loads(self.config), json.loads(self.verifier)
        return Checkpoint(config, dict(self.tensors), verifier, self.theirs)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """One of each layout that is read."""
    place = tmp_path_factory.mktemp("fuzz")
    shape, family = layouts.Shape(dtype="float16"), families.Family()
    draft = layouts.weights(shape)
    eagle3 = layouts.verifier(place / "verifier", shape)
    made = {
        "research": layouts.research(place / "research", shape, draft),
        "specforge": layouts.specforge(place / "specforge", shape, draft, ids=OUTPUT),
        "optimizer": layouts.model_optimizer(place / "optimizer", shape, draft, ids=OUTPUT),
        "angelslim": layouts.angelslim(place / "angelslim", shape, draft, ids=OUTPUT),
        "speculators": layouts.speculators(place / "speculators", shape, draft, ids=AFTER),
    }
    others = {
        "dflash": families.dflash(place / "dflash", family),
        "eagle": families.eagle(place / "eagle", family),
    }
    theirs = families.verifier(place / "theirs", family)
    mtp = families.with_mtp(place / "mtp", family, "qwen3_next")
    natives = {"native-dflash": (others["dflash"], theirs), "native-mtp": (mtp, mtp)}
    for name, (checkpoint, verifier) in natives.items():
        asked = ConvertParams(
            checkpoint=str(checkpoint), verifier=str(verifier), validate_on_verifier=False
        )
        convert(asked, place / name)
    return [
        *(Sound.read(name, directory, eagle3) for name, directory in made.items()),
        *(Sound.read(name, directory, theirs) for name, directory in others.items()),
        Sound.read("mtp", mtp, mtp),
        *(Sound.read(name, place / name, pair[1]) for name, pair in natives.items()),
    ]


def survive(sound, data):
    one = data.draw(st.sampled_from(sound))
    checkpoint = one.copy()
    damages = data.draw(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=3))
    for damage in sorted(damages, key=DAMAGES.index, reverse=True):  # bytes last
        with contextlib.suppress(*MISSED):
            damage(data.draw, checkpoint)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        checkpoint.lay_down(place)
        before = peak_mb()
        converted = attempt(place)
        assert peak_mb() - before < GROWTH_MB
        left = {path.name for path in place.iterdir()} - {"c", "v"}
        assert left == ({"out"} if converted else set())
        if converted:
            assert {path.name for path in (place / "out").iterdir()} >= KEPT


def attempt(place: Path) -> bool:
    params = ConvertParams(
        checkpoint=str(place / "c"), verifier=str(place / "v"), validate_on_verifier=False
    )
    errors = []
    for work in (
        lambda: inspect(place / "c", place / "v", roots=[place]).model_dump_json(),
        lambda: convert(params, place / "out", roots=[place]),
    ):
        began = time.process_time()
        try:
            work()
        except SpeclabError as error:
            assert error.message
            json.dumps(error.as_dict(), ensure_ascii=False).encode()
            errors.append(error)
        assert time.process_time() - began < SECONDS
    files = [os.path.realpath(place / "c" / name) for name in sorted(KEPT)]
    if "/etc/passwd" in files:
        assert isinstance(errors[-1], Forbidden)
    return len(errors) < 2 and (place / "out").exists()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def test_without_damage_each_of_them_converts(sound, tmp_path):
    for one in sound:
        place = tmp_path / one.layout
        place.mkdir()
        one.copy().lay_down(place)
        assert attempt(place), one.layout


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_a_damaged_checkpoint_ends_in_one_of_our_errors(sound, data):
    survive(sound, data)


@pytest.mark.prove
@settings(max_examples=2000, deadline=None, report_multiple_bugs=False, suppress_health_check=QUIET)
@given(data=st.data())
def test_two_thousand_damaged_checkpoints_end_in_one_of_our_errors(sound, data):
    survive(sound, data)


class Bomb:
    """Unpickled by a careless reader, it makes a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def saved(values, **more):
    out = io.BytesIO()
    torch.save(values, out, **more)
    return out.getvalue()


def rezipped(extra, compression=zipfile.ZIP_STORED, **replaced):
    """A sound archive with further parts, or with other bytes in a part."""
    whole, out = zipfile.ZipFile(io.BytesIO(saved({"a": torch.zeros(4096)}))), io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as changed:
        for part in whole.infolist():
            name = part.filename.split("/", 1)[1]
            changed.writestr(part.filename, replaced.get(name.replace(".", "_"), whole.read(part)))
        for name, content in extra.items():
            changed.writestr(name, content)
    return out.getvalue()


def tar(bomb):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps({"fc.weight": bomb} if name == "pickle" else {})
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def huge(_):
    """A legacy file whose storage says that it has 2**36 numbers."""
    small = saved({"a": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    return small.replace(b"K\x03", b"\x8a\x05\x00\x00\x00\x00\x10")


PICKLES = {
    "a value that is called": lambda bomb: saved({"fc.weight": bomb}),
    "the same, legacy": lambda bomb: saved({"a": bomb}, _use_new_zipfile_serialization=False),
    "a bare pickle": lambda bomb: pickle.dumps({"fc.weight": bomb}, protocol=2),
    "a tar archive": tar,
    "a pickle within a pickle": lambda bomb: saved({"fc.weight": pickle.dumps(bomb)}),
    "two pickles": lambda bomb: rezipped({"archive/evil.pkl": pickle.dumps(bomb)}),
    "the pickle of another folder": lambda bomb: rezipped({"x/data.pkl": pickle.dumps(bomb)}),
    "another pickle in its place": lambda bomb: rezipped({}, data_pkl=pickle.dumps(bomb, 2)),
    "a zip bomb": lambda _: rezipped({"archive/x": bytes(10**7)}, zipfile.ZIP_DEFLATED),
    "a storage that is said to be larger": huge,
    "more values than bytes": lambda _: saved({"a": torch.zeros(1).expand(10**6, 10**6)}),
    "a sparse tensor": lambda _: saved({"a": torch.eye(3).to_sparse()}),
    "a tensor without values": lambda _: saved({"a": torch.zeros(10, device="meta")}),
    "lists twenty thousand deep": lambda _: b"\x80\x02" + b"]" * 20_000 + b".",
    "nothing": lambda _: b"",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", PICKLES.values(), ids=PICKLES.keys())
def test_a_hostile_pickle_is_refused_and_nothing_in_it_runs(tmp_path, make):
    trace, file = tmp_path / "was-here", tmp_path / "pytorch_model.bin"
    file.write_bytes(make(Bomb(trace)))
    with pytest.raises(CheckpointError):
        load_pickled(file)
    assert not trace.exists()


def pickled_checkpoint(place, content):
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "pytorch_model.bin").write_bytes(content)
    return place


def test_the_process_that_reads_pickles_has_little_memory(tmp_path):
    """One that asks for 4 GB is told no; the limit is the file's size and half a GB."""
    small = saved({"a": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    content = small.replace(b"K\x03", b"J" + struct.pack("<i", 1 << 30))
    with pytest.raises(CheckpointError, match="can't allocate memory"):
        inspect(pickled_checkpoint(tmp_path / "c", content))


def test_the_process_that_reads_pickles_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("speculators_core.conversion.child._SILENCE_SECONDS", 0.2)
    with pytest.raises(CheckpointError, match=r"took over 0\.2 s"):
        inspect(pickled_checkpoint(tmp_path / "c", saved({"a": torch.zeros(3)})))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=30, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_a_damaged_pickle_ends_in_one_of_our_errors(data):
    content = bytearray(saved({"fc.weight": torch.zeros(8), "d2t": torch.arange(4)}))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "pytorch_model.bin")
        file.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
        with contextlib.suppress(CheckpointError):
            load_pickled(file)
