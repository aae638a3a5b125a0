"""The command line: statuses, JSON, flags made from the parameter models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from app import cli
from app.commands import core, generate
from app.commands.conversion import converted_lines
from app.commands.core_process import run_core
from app.commands.flags import flag_of, parse, read_config, with_flags
from app.commands.output import Misuse
from app.services import runs
from app.settings import settings
from speculators_core.errors import Conflict, InputError, NotFound, SpeclabError, Stopped
from speculators_core.params import (
    PARAMS_OF,
    DeployParams,
    GenerateParams,
    JobKind,
    Params,
    PrepareParams,
    TrainParams,
)
from tests.core.layouts import Shape, research, weights

HEAVY = ("gradio", "torch", "transformers", "celery", "sqlalchemy", "fastapi", "workers")


def speclab(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        env={**os.environ, "SPECLAB_HOME": str(home), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and stdout of a command run in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(str(ended.value.code)), capsys.readouterr().out


def test_importing_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, time; began = time.process_time()\n"
        "from app.commands import tree; tree.build()\n"
        f"print([m for m in {HEAVY} if m in sys.modules], time.process_time() - began)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded, _, seconds = said.rpartition(" ")
    assert loaded == "[]"
    assert float(seconds) < 1.0


def test_a_path_that_does_not_exist_is_status_1(tmp_path: Path) -> None:
    done = speclab("inspect", str(tmp_path / "absent"), "--json", home=tmp_path / "home")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1
    assert set(error) == {"kind", "message", "where", "hint"}
    assert str(tmp_path / "absent") in f"{error['message']} {error['where']}"
    assert not (tmp_path / "home").exists()


def test_an_unknown_flag_is_status_2_and_json_when_asked(tmp_path: Path) -> None:
    done = speclab("train", "--bogus", "1", "--json", home=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "usage"
    plain = speclab("train", "--bogus", "1", home=tmp_path)
    assert (plain.returncode, plain.stdout) == (2, "")
    assert "--bogus" in plain.stderr


def test_without_arguments_it_shows_help(tmp_path: Path) -> None:
    done = speclab(home=tmp_path)
    assert done.returncode == 2
    assert "up " in done.stdout + done.stderr


@pytest.mark.parametrize("place", ["n" * 300, "n/" * 3000, "~nobody-of-that-name/x"])
def test_what_can_not_be_a_path_is_status_1_and_json(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    status, said = in_process(capsys, "inspect", place, "--json")
    assert (status, json.loads(said)["error"]["kind"]) == (1, "not_found")
    done = speclab(
        *("convert", str(tmp_path), "--verifier", "v", "--output", place, "--json"), home=home
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "error" in json.loads(done.stdout)


@pytest.mark.parametrize("place", ["~nobody-of-that-name/x", os.fsdecode(b"not \xff UTF-8")])
def test_an_output_that_can_not_be_named_is_refused_before_the_work(place: str) -> None:
    with pytest.raises(InputError, match="can't be an output"):
        core.new_place(Path(place))


def test_an_output_that_is_a_link_to_nowhere_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(Conflict, match="exists already"):
        core.new_place(tmp_path / "link")


@pytest.mark.parametrize(
    ("fault", "kind"), [(KeyboardInterrupt(), "stopped"), (OSError("disk"), "error")]
)
def test_an_interrupt_and_a_fault_are_json_when_asked(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    kind: str,
) -> None:
    def fail(*_: object) -> str:
        raise fault

    monkeypatch.setattr("app.commands.inspect.path_of", fail)
    status, said = in_process(capsys, "inspect", "c", "--json")
    assert (status, json.loads(said)["error"]["kind"]) == (130 if kind == "stopped" else 1, kind)


@pytest.mark.parametrize("command", ["inspect", "runs"])
def test_an_interrupt_while_it_starts_is_quiet(tmp_path: Path, command: str) -> None:
    """The imports of a command are where it comes: SIGINT arrives at the first of them."""
    code = (
        "import builtins, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs
        "real = builtins.__import__\n"
        "def slow(name, *rest, **more):\n"
        "    if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = slow\n"
        f"from app.cli import main; main([{command!r}, 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_looking_takes_what_a_conversion_would_be_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = research(tmp_path / "draft", Shape(), weights(Shape()))
    told = ["--aux-layers", "1,2,4", "--aux-convention", "output", "--speculative-tokens", "5"]
    status, said = in_process(capsys, "inspect", str(draft), *told, "--json")
    config = json.loads(said)["config"]
    assert status == 0
    assert config["eagle_aux_hidden_state_layer_ids"] == {"value": [2, 3, 5], "origin": "parameter"}
    assert config["speculative_tokens"] == {"value": 5, "origin": "parameter"}
    status, said = in_process(capsys, "inspect", str(draft), "--dtype", "float16")
    assert (status, "written as float16 as asked for" in said) == (0, True)
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(draft), "--max-shard-size", "5"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prepare", "a.jsonl", "--output", "o"], "--verifier"),
        (["convert", "c", "--verifier", "v", "--aux-layers", "2,x", "--output", "o"], "aux_layers"),
        (["convert", "c", "--verifier", "v", "--rope-theta", "inf", "--output", "o"], "rope_theta"),
        (["train", "--data", "d", "--verifier", "v"], "--output"),
        (["train", "--data", "d", "--verifier", "v", "--epochs", "0", "--output", "o"], "epochs"),
        (["submit", "deploy", "--verifier", "v", "--engine", "magic"], "engine"),
        (["logs"], "RUN"),
        (["runs", "--kind", "dance"], "--kind"),
        (["runs", "--state", "tired"], "--state"),
    ],
)
def test_wrong_usage_names_the_flag(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert named.lower() in said.err.lower()


def test_an_output_that_exists_is_not_touched(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "there"
    output.mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", "a.jsonl", "--verifier", "v", "--output", str(output)])
    assert ended.value.code == 1
    assert "exists already" in capsys.readouterr().err
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("kind", list(JobKind))
def test_every_parameter_has_its_flag_and_its_help(
    kind: JobKind, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = in_process(capsys, "submit", kind.value.replace("_", "-"), "--help")
    words = " ".join(said.split()).lower()
    assert status == 0
    for name, field in PARAMS_OF[kind].model_fields.items():
        assert flag_of(name) in said
        assert " ".join((field.description or "").split()).lower()[:30] in words


def _given(model: type[Params], *arguments: str, **options: Any) -> dict[str, Any]:
    """What the flags of a model make of a command line."""
    heard: list[dict[str, Any]] = []
    app = typer.Typer()
    app.command()(with_flags(lambda flags: heard.append(flags), model, **options))
    typer.main.get_command(app)(list(arguments), standalone_mode=False)
    return heard[0]


def test_flags_carry_only_what_was_given() -> None:
    given = _given(TrainParams, "--data", "d", "--no-norm-output", "--aux-layers", "2, 15,27")
    assert given == {"data": "d", "norm_output": False, "aux_layers": ["2", "15", "27"]}
    params = parse(TrainParams, {**given, "verifier": "v"})
    assert params == TrainParams(data="d", verifier="v", norm_output=False, aux_layers=(2, 15, 27))


def test_none_empties_a_field_that_may_be_empty() -> None:
    given = _given(PrepareParams, "a", "b", "--draft-vocab-size", "none", positional="data")
    assert given == {"data": ["a", "b"], "draft_vocab_size": None}
    deploy = _given(DeployParams, positional="speculator", optional_positional=True)
    assert deploy == {}


def test_flags_override_the_configuration_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("data: d\nverifier: v\nepochs: 3\nlr: 2.0e-4\n")
    asked: list[dict[str, Any]] = []

    def remember(kind: str, request: dict[str, Any], listener: object) -> dict[str, Any]:
        asked.append({"kind": kind, **request})
        return {"output": request["output"]}

    monkeypatch.setattr(core, "run_core", remember)
    arguments = ["--config", str(config), "--epochs", "5", "--output", str(tmp_path / "o")]
    status, said = in_process(capsys, "train", *arguments, "--json")
    assert (status, json.loads(said)) == (0, {"output": str(tmp_path / "o")})
    assert asked[0]["kind"] == "train"
    assert (asked[0]["params"]["epochs"], asked[0]["params"]["lr"]) == (5, 2e-4)


@pytest.mark.parametrize("text", ["[1, 2]", "epochs: [", "epohcs: 3"])
def test_a_configuration_file_that_is_wrong_is_wrong_usage(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(Misuse, match=r"c\.yaml|mapping|epohcs|YAML"):
        read_config(config, TrainParams)
    with pytest.raises(Misuse, match="no such file"):
        read_config(tmp_path / "absent.yaml", TrainParams)


def test_a_run_is_submitted_from_the_yaml_that_pages_show(
    sqlite_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.ui.commands import yaml_text

    verifier = tmp_path / "v: # é"
    verifier.mkdir()
    params = TrainParams(
        data="org/d", verifier=str(verifier), lr=2e-5, aux_layers=(1, 2, 3), epochs=3
    )
    config = tmp_path / "train.yaml"
    config.write_text(yaml_text(TrainParams, params.model_dump(mode="json")))
    status, said = in_process(
        capsys, "submit", "train", "--config", str(config), "--epochs", "5", "--json"
    )
    assert status == 0, said
    given = TrainParams.model_validate(json.loads(said)["params"])
    assert given == params.model_copy(update={"epochs": 5})


def test_an_interrupted_training_goes_on_with_its_own_parameters(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "draft"
    asked: list[dict[str, Any]] = []

    def interrupted_once(kind: str, request: dict[str, Any], listener: object) -> dict[str, Any]:
        asked.append(request)
        if len(asked) == 1:
            (tmp_path / "draft.checkpoints").mkdir()
            raise Stopped("saved")
        output.mkdir()
        return {"output": request["output"]}

    monkeypatch.setattr(core, "run_core", interrupted_once)
    flags = ["--data", "d", "--verifier", "v", "--lr", "0.5", "--output", str(output)]
    assert in_process(capsys, "train", *flags)[0] == 1
    checkpoints = str(tmp_path / "draft.checkpoints")
    assert in_process(capsys, "train", "--resume", checkpoints, "--lr", "1")[0] == 2
    assert in_process(capsys, "train", "--resume", checkpoints)[0] == 0
    assert asked[1] == {**asked[0], "resume": checkpoints}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_the_training_of_a_run_goes_on_from_its_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "abc"
    (run / "artifacts").mkdir(parents=True)
    params = TrainParams(data="d", verifier="v")
    (run / "params.json").write_text(params.model_dump_json())
    asked: list[dict[str, Any]] = []

    def remember(kind: str, request: dict[str, Any], listener: object) -> dict[str, Any]:
        asked.append(request)
        return {"output": request["output"]}

    monkeypatch.setattr(core, "run_core", remember)
    assert in_process(capsys, "train", "--resume", str(run))[0] == 2
    new = str(tmp_path / "new")
    assert in_process(capsys, "train", "--resume", str(run), "--output", new)[0] == 0
    assert asked[0]["resume"] == str(run / "artifacts")
    assert TrainParams.model_validate(asked[0]["params"]) == params


def test_a_training_that_never_began_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(kind: str, request: dict[str, Any], listener: object) -> dict[str, Any]:
        raise NotFound("no such data")

    monkeypatch.setattr(core, "run_core", refuse)
    flags = ["--data", "d", "--verifier", "v", "--output", str(tmp_path / "draft")]
    assert in_process(capsys, "train", *flags)[0] == 1
    assert in_process(capsys, "train", "--resume", str(tmp_path / "absent"))[0] == 1
    assert [p for p in tmp_path.iterdir() if p != home] == []


def test_registered_names_stand_for_paths_where_there_is_a_store(
    sqlite_store: str, tmp_path: Path
) -> None:
    assert core.path_of(str(tmp_path), "data") == str(tmp_path)
    with pytest.raises(NotFound, match="no registered name"):
        core.path_of("unheard-of", "verifier")


def test_without_a_store_references_stay_as_they_are(home: Path) -> None:
    assert core.path_of("org/model", "verifier") == "org/model"


def test_the_queue_is_reached_from_a_terminal(
    sqlite_store: str, rings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verifier", "--name", "tiny", "--run-name", "mine", "--priority", "2", "--json"]
    status, said = in_process(capsys, "submit", *arguments)
    run = json.loads(said)
    assert (status, run["state"], run["priority"]) == (0, "queued", 2)
    assert rings == [run["id"]]

    assert run["id"] in in_process(capsys, "runs")[1]
    assert json.loads(in_process(capsys, "runs", "--json")[1])["total"] == 1
    log = settings().run_dir(run["id"]) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    assert in_process(capsys, "logs", run["id"]) == (0, "a line\n")
    assert in_process(capsys, "cancel", run["id"])[0] == 0
    assert in_process(capsys, "logs", "-f", run["id"]) == (0, "a line\n")
    assert runs.get(run["id"]).state.value == "cancelled"
    assert in_process(capsys, "cancel", "absent", "--json")[0] == 1


def test_submitted_paths_become_absolute(
    sqlite_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    arguments = ["--data", "chats.jsonl,org/named", "--verifier", "org/v", "--json"]
    _, said = in_process(capsys, "submit", "prepare", *arguments)
    assert json.loads(said)["params"]["data"] == [str(tmp_path / "chats.jsonl"), "org/named"]


def test_where_nothing_runs_status_and_down_say_so(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = in_process(capsys, "status", "--json")
    assert (status, json.loads(said)["up"]) == (0, False)
    assert in_process(capsys, "down") == (0, "nothing was running\n")
    assert in_process(capsys, "status", "--link")[0] == 1
    for command in (["runs"], ["logs", "x"], ["cancel", "x"], ["submit", "verifier"]):
        status, said = in_process(capsys, *command, "--json")
        assert (status, json.loads(said)["error"]["kind"]) == (1, "not_found")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "many"), ("DATABASE_URL", "postgres"), ("BROKER_URL", "here")]
)
def test_a_setting_that_can_not_be_right_is_named(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(f"SPECLAB_{name}", value)
    settings.cache_clear()
    status, said = in_process(capsys, "runs", "--json")
    monkeypatch.delenv(f"SPECLAB_{name}")
    error = json.loads(said)["error"]
    assert (status, error["where"]) == (1, f"SPECLAB_{name}")
    assert error["hint"]


def test_db_upgrade_makes_the_store(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = in_process(capsys, "db", "upgrade", "--json")
    assert first == in_process(capsys, "db", "upgrade", "--json")
    assert first[0] == 0
    assert (home / "speclab.db").exists()


def _core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> tuple[list[dict[str, Any]], str]:
    """Put a stand-in for `speculators_core` first in the path of core processes."""
    package = tmp_path / "stand-in" / "speculators_core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import json, os, signal, sys, time\n" + body)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.chdir(package.parent)
    return [], str(package)


def test_events_of_a_core_process_are_heard_and_its_result_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard, _ = _core(
        monkeypatch,
        tmp_path,
        "asked = json.load(sys.stdin)\n"
        'print(json.dumps({"progress": 0.5, "text": "half"}), file=sys.stderr)\n'
        'print("a library speaks", file=sys.stderr)\n'
        'print(json.dumps({**asked, "kind": sys.argv[1], "long": "x" * 300_000}))\n',
    )
    result = run_core("train", {"params": {"lr": 1}}, heard.append)
    assert (result["kind"], result["params"]) == ("train", {"lr": 1})
    assert heard == [{"progress": 0.5, "text": "half"}, {"note": "a library speaks"}]


def test_an_error_of_a_core_process_is_raised_as_what_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _core(
        monkeypatch,
        tmp_path,
        'print(json.dumps({"error": {"kind": "conflict", "message": "m", "where": "w"}}))\n'
        "sys.exit(1)\n",
    )
    with pytest.raises(Conflict, match="m") as raised:
        run_core("convert", {}, lambda event: None)
    assert raised.value.where == "w"


def test_a_core_process_that_is_killed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _core(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(SpeclabError, match="status -9"):
        run_core("train", {}, lambda event: None)


def test_ctrl_c_asks_the_work_to_stop_and_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _core(
        monkeypatch,
        tmp_path,
        "stop = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.append(1))\n"
        'print(json.dumps({"note": "at work"}), file=sys.stderr)\n'
        "while not stop: time.sleep(0.01)\n"
        'print(json.dumps({"error": {"kind": "stopped", "message": "saved"}})); sys.exit(1)\n',
    )
    with pytest.raises(Stopped, match="saved"):
        run_core("train", {}, lambda event: os.kill(os.getpid(), signal.SIGINT))


def test_ctrl_c_before_the_work_began_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _core(monkeypatch, tmp_path, 'print("starting", file=sys.stderr); time.sleep(60)\n')
    with pytest.raises(Stopped, match="before it began"):
        run_core("train", {}, lambda event: os.kill(os.getpid(), signal.SIGINT))


def test_work_ends_when_its_command_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _core(
        monkeypatch,
        tmp_path,
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n",
    )
    command = [sys.executable, "-c", _RUN_CORE]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    parent = subprocess.Popen(command, env={**environment, "STAND_IN": os.environ["PYTHONPATH"]})
    pid = int(_eventually(lambda: (tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    _eventually(lambda: not Path(f"/proc/{pid}").exists())


_RUN_CORE = """
import os
import app.commands.core_process as c
os.environ["PYTHONPATH"] = os.environ["STAND_IN"]
os.chdir(os.environ["STAND_IN"])
c.run_core("train", {}, print)
"""


def test_malformed_requests_to_the_core_are_errors_in_json(tmp_path: Path) -> None:
    for arguments, stdin in (
        (["train"], "{"),
        (["nothing"], "{}"),
        (["train"], '{"params": {"bogus": 1}}'),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "speculators_core", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert json.loads(done.stdout)["error"]["kind"] == "input"


STEP = {
    "step": 2,
    "drafted": [" two", " x\n", " y"],
    "accepted": 1,
    "emitted": [" two", " three"],
}


def test_tokens_are_marked_by_who_proposed_them() -> None:
    assert generate.marked(STEP) == "+ two - x⏎ - y = three"
    text = generate.coloured(STEP, rejected=False)
    assert text.plain == " two three"
    assert [str(span.style) for span in text.spans] == [generate.ACCEPTED, generate.OWN]
    styles = " ".join((generate.ACCEPTED, generate.OWN, generate.REJECTED))
    assert all(decoration in styles for decoration in ("underline", "bold", "strike"))


def test_no_speculation_leaves_the_draft_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def remember(kind: str, request: dict[str, Any], listener: object) -> dict[str, Any]:
        asked.append(request["params"])
        return {"text": ""}

    monkeypatch.setattr(generate, "run_core", remember)
    arguments = ["--speculator", "s", "--verifier", "v", "--prompt", "p", "--no-speculation"]
    assert in_process(capsys, "generate", *arguments, "--json")[0] == 0
    assert asked[0]["speculator"] is None
    assert parse(GenerateParams, asked[0]).prompt == "p"


def _eventually(look: Any, seconds: float = 15.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := look():
                return found
        except OSError:
            pass
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def serving(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`speclab serve` with a stand-in for `workers.serve`, which answers and waits."""
    package = folder / "stand-in" / "workers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "serve.py").write_text(
        "import json, signal, sys\n"
        "told = {'endpoint': 'http://127.0.0.1:1', 'notes': ['mind the step']}\n"
        "told['served_name'] = json.load(sys.stdin)['verifier']\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print(json.dumps(told), flush=True)\n"
        "signal.pause()\n"
    )
    root = Path(cli.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", *arguments],
        env={
            **os.environ,
            "SPECLAB_HOME": str(folder / "home"),
            "PYTHONPATH": f"{package.parent}:{root}",
        },
        cwd=package.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_serve_bars_what_a_deployment_would_and_lets_a_person_decide(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    report = {
        "deployable": False,
        "doubts": [],
        "serving": {"algorithm": "eagle3"},
        "validation": {"failed": ["first-token acceptance is exactly 0"]},
    }
    (draft / "conversion_report.json").write_text(json.dumps(report))
    asked = [str(draft), "--verifier", "org/model"]
    refused = serving(tmp_path / "a", *asked)
    _, said = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "first-token acceptance is exactly 0" in said and "--allow" in said
    allowed = serving(tmp_path / "b", *asked, "--allow")
    assert allowed.stdout
    assert allowed.stdout.readline() == "Note: mind the step\n"
    allowed.send_signal(signal.SIGINT)
    assert allowed.wait(20) == 0


def test_serve_tells_where_the_server_answers_and_ends_it(tmp_path: Path) -> None:
    process = serving(tmp_path, "--verifier", "org/model", "--json")
    assert process.stdout
    told = json.loads(process.stdout.readline())
    assert told["served_name"] == "org/model"
    (server,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert not psutil.pid_exists(server.pid)


def test_a_worker_of_a_lab_must_know_its_lab(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = in_process(capsys, "worker", "--json")
    assert status == 1
    assert json.loads(said)["error"]["where"] == "SPECLAB_BROKER_URL"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4"])
def test_up_refuses_to_listen_for_others(
    home: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    status, said = in_process(capsys, "up", "--host", host, "--json")
    assert status == 1
    assert "no accounts yet" in json.loads(said)["error"]["message"]
    assert list(home.iterdir()) == []


def test_the_console_script_is_installed() -> None:
    assert shutil.which("speclab", path=str(Path(sys.executable).parent))


def test_a_conversion_ends_in_words_and_not_in_json() -> None:
    choices = [{"params": {"aux_layers": [2, 4, 5]}, "meaning": "after these layers"}]
    found = {
        "output": "/o",
        "report": "/o/conversion_report.json",
        "validation": {"ok": False, "first_token_acceptance": 0.01, "failed": ["accepts nothing"]},
        "doubts": [{"about": "aux layers", "choices": choices, "chosen": None}],
        "warnings": ["untried beyond 2048"],
        "deployable": False,
    }
    assert list(converted_lines(found)) == [
        "output: /o",
        "report: /o/conversion_report.json",
        "validation: failed; accepts nothing; first-token acceptance 0.01",
        "doubt: aux layers (open: one of these)",
        "     --aux-layers 2,4,5  after these layers",
        "warning: untried beyond 2048",
        "deployable: no, until a person decides",
    ]
    unjudged = {"ok": None, "first_token_acceptance": None, "failed": [], "note": "no verifier"}
    assert "validation: none: no verifier" in converted_lines({**found, "validation": unjudged})
