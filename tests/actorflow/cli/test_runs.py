"""Runs as folders: what they were started with, where they differ, and how they are resumed."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import actorflow as af
from actorflow import nn
from actorflow.cli.main import main
from actorflow.environment.settings import __version__
from actorflow.run.run_record import RunRecordError, read_record
from compiler.contract.plan import Plan

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
import numpy as np
import actorflow as af
from actorflow import nn

rate, steps, run = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

@af.job(optimizer=af.optim.SGD(rate), seed=3)
def train(model, batch):
    return ((model(batch.x) - 1.0) ** 2).mean()

x = np.arange(32, dtype=np.float32).reshape(16, 2) / 32
data = af.data.ArraySource({"x": x}, batch=4)
train.fit(nn.Linear(2, 1), data, steps=steps, every=2, checkpoint=run, progress=False)
"""


@pytest.fixture
def started(tmp_path):
    """Start the script in a folder of its own, and return the folder of the run."""

    def start(run, *arguments, python=(), typed=""):
        (tmp_path / "train.py").write_text(typed + SCRIPT)
        words = [sys.executable, *python, "train.py", *arguments, run]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORFLOW_NATIVE": "0"}
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
        return tmp_path / run

    return start


def fitted(run, **options):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x).mean()

    data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)
    train.fit(nn.Linear(2, 1), data, checkpoint=run, progress=False, **options)


def output(capsys, *words, code=0):
    assert main([*map(str, words)]) == code
    return capsys.readouterr().out


def test_a_run_says_what_it_was_started_with_and_each_start_adds_itself(started, tmp_path):
    started("a", "0.1", "4")
    run = started("a", "0.1", "6", python=("-X", "dev"))
    record = read_record(run)
    assert (record.job, record.num_parameters, record.num_ranks) == ("train", 3, 1)
    assert record.options["seed"] == "3"
    assert "lr=0.1" in record.options["optimizer"]
    assert (record.asked["steps"], record.asked["every"]) == ("6", "2")
    assert record.data == "ArraySource(x: float32; 16 samples, batches of 4)"
    assert record.plan == Plan.load(run / "job.plan").fingerprint
    assert [start.first_step for start in record.starts] == [0, 4]
    first, second = record.starts
    assert first.command == (sys.executable, "train.py", "0.1", "4", "a")
    assert second.command[1:4] == ("-X", "dev", "train.py")
    assert second.folder == str(tmp_path)
    assert second.versions["actorflow"] == __version__
    assert second.environment["ACTORFLOW_NATIVE"] == "0"


def git(folder, *words):
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *name, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_run_names_its_commit_and_whether_files_have_changed(started, tmp_path):
    try:
        git(tmp_path, "init")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (tmp_path / "train.py").write_text(SCRIPT)
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    newest = read_record(started("a", "0.1", "2")).newest
    assert (newest.git_commit, newest.has_changes) == (commit, False)
    git(tmp_path, "rm", "--cached", "train.py")
    newest = read_record(started("a", "0.1", "4")).newest
    assert (newest.git_commit, newest.has_changes) == (commit, True)


def test_runs_are_listed_and_compared_by_what_differs(started, tmp_path, capsys):
    runs = [started("a", "0.1", "4"), started("b", "0.5", "6")]
    lines = output(capsys, "runs", "ls", tmp_path).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["b", "finished", "6/6"], ["a", "finished", "4/4"]
    ]  # fmt: skip
    rows = json.loads(output(capsys, "runs", "ls", tmp_path, "--json"))
    assert [(row["name"], row["status"]["step"]) for row in rows] == [("b", 6), ("a", 4)]
    facts = json.loads(output(capsys, "runs", "compare", *runs, "--json"))["facts"]
    assert facts["command"] == ["train.py 0.1 4 a", "train.py 0.5 6 b"]
    assert facts["fit option steps"] == ["4", "6"]
    assert {"job", "data", "ranks", "processor"}.isdisjoint(facts)
    rates = [text.partition(",")[0] for text in facts["job option optimizer"]]
    assert rates == ["SGD(lr=0.1", "SGD(lr=0.5"]
    assert "result loss_last" in facts
    whole = output(capsys, "runs", "compare", *runs, "--all")
    assert "job option seed" in whole
    same = output(capsys, "runs", "compare", runs[0], runs[0])
    assert same == "2 runs, and nothing differs\n"


def test_a_run_is_resumed_by_the_command_of_its_newest_start(started, tmp_path, capsys):
    run = started("a", "0.1", "4")
    shown = output(capsys, "resume", run, "--print")
    assert shown == f"cd {tmp_path} && {shlex.quote(sys.executable)} train.py 0.1 4 a\n"
    values = json.loads((run / "run.json").read_text())
    values["starts"][0]["command"][-2] = "8"  # as if it had been stopped before
    values["starts"][0]["environment"] |= {"PYTHONSTARTUP": "x", "LD_PRELOAD": "x"}
    (run / "run.json").write_text(json.dumps(values))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "actorflow", "resume", str(run)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "train.py 0.1 8 a" in done.stderr
    assert "LD_PRELOAD" not in done.stderr
    assert [start.first_step for start in read_record(run).starts] == [0, 4]


def test_ranks_are_resumed_by_the_command_of_their_launcher(started, tmp_path, monkeypatch):
    told = ["python3", "-m", "actorflow", "launch", "-n", "2", "train.py"]
    monkeypatch.setenv("ACTORFLOW_COMMAND", json.dumps(told))
    fitted(tmp_path / "a", steps=1)
    assert list(read_record(tmp_path / "a").newest.command) == told


def test_what_a_person_typed_cannot_be_resumed(started, capsys):
    run = started("a", "0.1", "2", typed="import sys; sys.ps1 = '>>> '")
    assert main(["resume", str(run)]) == 1
    assert "call fit again with the same checkpoint=" in capsys.readouterr().err


def test_the_weights_of_a_run_are_exported_with_how_they_were_made(tmp_path, capsys):
    fitted(tmp_path / "a", steps=2)
    file = tmp_path / "a.safetensors"
    output(capsys, "runs", "export", tmp_path / "a", file)
    assert {name: array.shape for name, array in load_file(file).items()} == {
        "weight": (1, 2), "bias": (1,)
    }  # fmt: skip
    described = json.loads((tmp_path / "a.json").read_text())
    assert described["job"] == "train"
    assert "loss" in described["results"]
    assert main(["runs", "export", str(tmp_path / "a"), str(file)]) == 1
    assert "is there already" in capsys.readouterr().err


HOSTILE = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"format": 99}',
    json.dumps({"job": "\x1b[31mred"}).encode(),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_record_that_is_damaged_is_one_line_and_the_next_start_writes_it_anew(
    tmp_path, capsys, text
):
    run = tmp_path / "a"
    fitted(run, steps=1)
    (run / "run.json").write_bytes(text)
    with pytest.raises(RunRecordError):
        read_record(run)
    (line,) = output(capsys, "runs", "ls", tmp_path).splitlines()[1:]
    assert "is damaged or of another version" in line
    assert line.isprintable()
    assert main(["runs", "compare", str(run), str(run)]) == 1
    assert main(["resume", str(run)]) == 1
    fitted(run, steps=2)
    assert len(read_record(run).starts) == 1


def test_texts_of_a_hostile_record_can_do_nothing_on_a_terminal(tmp_path, capsys):
    run = tmp_path / "a"
    fitted(run, steps=1)
    values = json.loads((run / "run.json").read_text())
    values |= {"job": "\x1b]0;owned\x07", "options": {"x\x1b[2J": "\u202e"}}
    values["starts"][0] |= {"command": ["/bin/true", "\x1b[31m"], "folder": "/\x1b[5m"}
    (run / "run.json").write_text(json.dumps(values))
    for words in (["runs", "ls", tmp_path], ["runs", "compare", run, run, "--all"],
                  ["resume", run, "--print"]):  # fmt: skip
        for line in output(capsys, *words).splitlines():
            assert line.isprintable()


@pytest.mark.parametrize("place", ["link", "fifo", "folder"])
def test_a_record_is_never_written_through_what_lies_at_its_name(tmp_path, place, caplog):
    run = tmp_path / "a"
    fitted(run, steps=1)
    path, other = run / "run.json", tmp_path / "other"
    path.unlink()
    other.write_text("kept")
    if place == "link":
        path.symlink_to(other)
    elif place == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    fitted(run, steps=2)
    assert other.read_text() == "kept"


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path, capsys):
    assert output(capsys, "runs", "ls", tmp_path, code=1) == f"no runs in {tmp_path}\n"
    assert main(["runs", "ls", str(tmp_path / "gone")]) == 1
    assert "no such directory" in capsys.readouterr().err
