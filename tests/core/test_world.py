"""Several processes train what one does; none outlives the others."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.errors import DataError, SpeclabError, Stopped
from speculators_core.params import TrainParams
from speculators_core.progress import Quiet
from speculators_core.training.checkpointing import Checkpoint, Position
from speculators_core.training.places import check_same_step, check_shared
from speculators_core.training.quarantine import Quarantine
from speculators_core.training.train import TrainResult, train
from speculators_core.training.world import World, join
from tests import tiny
from tests.core.listening import Listener
from tests.core.proofs import record
from tests.core.small_data import prepare_chats


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """Eight chats: seven to train on and one to validate."""
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier, count=8)


def run(
    data: Path,
    verifier: Path,
    output: Path,
    listener: Listener | None = None,
    resume: Path | None = None,
    **changes: object,
) -> TrainResult:
    values = {
        "data": str(data),
        "verifier": str(verifier),
        "aux_layers": tiny.AUX_LAYERS,
        "epochs": 2,
        "tokens_per_batch": 1,  # a chat a row
        "validate_every": 3,
        "evaluate_every": 3,
        "evaluate_prompts": 2,
        "evaluate_tokens": 8,
        "save_every": 2,
    }
    params = TrainParams.model_validate({**values, **changes})
    return train(params, output, listener, resume)


def assert_same_run(one: Listener, two: Listener) -> None:
    assert one.steps.keys() == two.steps.keys()
    for step, values in one.steps.items():
        for name, value in values.items():
            if name.startswith(("loss", "val_", "acceptance", "measured", "lr", "grad_norm")):
                assert two.steps[step][name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


def test_two_processes_train_what_one_does(data: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    """C9: seven chats on two processes, the last step with a row for one of them alone."""
    alone, together = Listener(), Listener()
    first = run(data, tiny_verifier, tmp_path / "one", alone, accumulate=2)
    second = run(data, tiny_verifier, tmp_path / "two", together, processes=2)
    assert first.steps == second.steps == 8
    assert_same_run(alone, together)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    assert any("2 processes (ddp)" in note for note in together.notes)
    assert sum("frozen:" in note for note in together.notes) == 1  # the first alone tells
    assert not (tmp_path / "two.checkpoints").exists()


@pytest.mark.prove
def test_a_sharded_draft_trains_what_a_whole_one_does(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    """FSDP2, stopped half-way and resumed by one process: the same curve and weights."""
    alone = Listener()
    run(data, tiny_verifier, tmp_path / "one", alone, accumulate=2)
    stopper = Listener(lambda me: any(step >= 3 for step in me.steps))
    with pytest.raises(Stopped, match="it can resume"):
        run(data, tiny_verifier, tmp_path / "two", stopper, processes=2, sharding="fsdp")
    rest = Listener()
    resumed = tmp_path / "two.checkpoints"
    run(data, tiny_verifier, tmp_path / "two", rest, resumed, accumulate=2)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    whole = Listener()
    run(data, tiny_verifier, tmp_path / "three", whole, processes=2, sharding="fsdp")
    assert_same_run(alone, whole)


@pytest.mark.prove
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_ends_the_others_within_two_minutes(
    data: Path, tiny_verifier: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """F7, C9: in the middle of a run."""
    killed: list[int] = []

    class Killer(Listener):
        def metrics(self, step: int, values: dict[str, float]) -> None:
            super().metrics(step, values)
            if not killed:
                killed.append(ranks()[-1])
                began.append(time.monotonic())
                os.kill(killed[0], how)

    began: list[float] = []
    with pytest.raises(SpeclabError, match=r"died|failed"):
        run(data, tiny_verifier, tmp_path / "out", Killer(), processes=2, epochs=400)
    seconds = time.monotonic() - began[0]
    assert seconds < 120 and not ranks()
    assert list((tmp_path / "out.checkpoints").glob("step-*"))
    record("training_processes", {"signal": how.name, "ended_after_seconds": round(seconds, 1)})


@pytest.mark.prove
def test_processes_end_with_whoever_started_them(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    """F7: the group of the job is killed; torchrun's processes have sessions of their own."""
    job = get_context("fork").Process(
        target=_job, args=(data, tiny_verifier, tmp_path / "out"), kwargs={"epochs": 400}
    )
    job.start()
    assert job.pid
    _until(lambda: len(ranks()) == 2, 120)
    os.killpg(job.pid, signal.SIGKILL)
    job.join(10)
    _until(lambda: not ranks(), 20)


@pytest.mark.prove
def test_what_one_process_complains_of_is_the_error_of_all(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="not a prepared data set"):
        run(tmp_path, tiny_verifier, tmp_path / "out", processes=2)
    assert not ranks()


@pytest.mark.prove
def test_two_machines_meet(data: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    """Two agents of one process each, here on one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {"nodes": 2, "rendezvous": f"127.0.0.1:{free.getsockname()[1]}"}
    other = get_context("spawn").Process(
        target=run,
        args=(data, tiny_verifier, tmp_path / "two", None, None),
        kwargs={**together, "node_rank": 1},
    )
    other.start()
    listener, alone = Listener(), Listener()
    run(data, tiny_verifier, tmp_path / "two", listener, **together)
    other.join(60)
    assert other.exitcode == 0
    run(data, tiny_verifier, tmp_path / "one", alone, accumulate=2)
    assert_same_run(alone, listener)


def test_processes_whose_machines_share_no_disk_say_so_before_anything_starts(
    tmp_path: Path,
) -> None:
    def look(world: World) -> None:
        check_shared(world, tmp_path / str(world.rank))

    said = together(look)
    assert all("process 1 does not see what process 0 writes" in each for each in said)
    assert together(lambda world: check_shared(world, tmp_path)) == ["None", "None"]
    assert not list(tmp_path.glob("**/.shared*"))


def test_processes_that_found_different_checkpoints_do_not_go_on() -> None:
    def compare(world: World, steps: tuple[int, int]) -> None:
        found = Checkpoint(Position(step=steps[world.rank]), {}, {}) if steps[world.rank] else None
        check_same_step(world, found, "out.checkpoints")

    for said in together(lambda world: compare(world, (8, 0))):
        assert "process 0 that of step 8, process 1 none" in said and "one shared disk" in said
    assert together(lambda world: compare(world, (8, 8))) == ["None", "None"]


def test_a_chat_that_one_process_sets_aside_is_set_aside_by_all() -> None:
    """B7"""

    def find(world: World) -> object:
        quarantine = Quarantine(100, "data", Quiet(), growing=True)
        if world.rank == 1:
            quarantine.add(3)
        return quarantine.settle(world), quarantine.settle(world), quarantine.documents

    assert together(find) == ["(True, False, {3})"] * 2


def together(work: Callable[[World], object]) -> list[str]:
    """What two processes of one group return or complain of, by rank, as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    context = get_context("fork")
    told = [context.SimpleQueue() for _ in range(2)]

    def be(rank: int) -> None:
        torch.set_num_threads(1)  # a forked process has no pool of threads
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": "0"}
        os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        try:
            told[rank].put(str(work(join())))
        except SpeclabError as error:
            told[rank].put(str(error.as_dict()))

    processes = [context.Process(target=be, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return [queue.get() for queue in told]


def _job(*args: object, **changes: object) -> None:
    os.setpgid(0, 0)
    run(*args, processes=2, **changes)


def _until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)


def ranks() -> list[int]:
    """Living processes of this test's trainings."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            agent = "speculators_core.training.launch" in command
            if "speculators_core.training.rank" in command and not agent:
                found.append(int(entry.name))
    return sorted(found)
