"""A path that begins with ~ is in the home folder, wherever a user writes it."""

import os
from pathlib import Path

import pytest

import actorflow as af
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.cli.main import main
from actorflow.environment.settings import Settings
from actorflow.run.report import read_metrics
from actorflow.run.status import read_status


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder; nothing is written into the folder of the process."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert os.listdir(here) == []


@pytest.mark.parametrize("directory", ["~/run", Path("~/run"), "~/deep/run", "~/./run", "~"])
def test_a_run_is_kept_in_the_home_folder(home, mlp, classification, directory):
    train.fit(mlp(), classification(), steps=2, checkpoint=directory, progress=False)
    place = Path(os.path.expanduser(directory))
    assert place.is_relative_to(home)
    assert {".lock", "metrics.jsonl", "status.json", "step-0000000002"} <= {*os.listdir(place)}
    assert read_status(directory).step == 2
    assert CheckpointManager(directory).steps() == (2,)
    assert read_metrics(f"{directory}/metrics.jsonl")[-1]["step"] == 2
    result = train.fit(mlp(), classification(), steps=4, checkpoint=directory, progress=False)
    assert result.last_step == 4


def test_plans_and_texts_are_read_from_the_home_folder(home, mlp, classification):
    plan = train.compile(mlp(), classification())
    plan.save("~/p.plan")
    assert af.Plan.load(Path("~/p.plan")) == plan
    assert (home / "p.plan").is_file()
    (home / "text").write_text("abcdefgh" * 10)
    for paths in ("~/text", [Path("~/text")]):
        assert next(af.data.Tokens.from_files(paths, seq=4, batch=2))["x"].shape == (2, 4)


def test_the_options_of_commands_are_paths_in_the_home_folder(home, mlp, classification, capsys):
    train.compile(mlp(), classification()).save("~/p.plan")
    train.fit(mlp(), classification(), steps=2, checkpoint="~/run", progress=False)
    (home / "buffers.csv").write_text("id,lower,upper,size\na,0,3,8\n")
    for arguments in (
        ["plan", "~/p.plan", "--save=~/q.plan", "--memory=~/map.html", "--without=~/p.plan"],
        ["simulate", "~/p.plan", "--no-calibrate", "--steps=2", "--trace=~/trace.json"],
        ["ckpt", "ls", "~/run"],
        ["ckpt", "verify", "~/run"],
        ["top", "~/run", "--once"],
        ["pack", "~/buffers.csv"],
    ):
        assert main(arguments) == 0, capsys.readouterr()
    made = {"p.plan", "q.plan", "map.html", "trace.json", "run", "buffers.csv"}
    assert made <= {*os.listdir(home)}


@pytest.mark.parametrize("name", ["CACHE", "TRACE", "DUMP"])
def test_variables_are_paths_in_the_home_folder(home, name):
    def asked(value, **others):
        return getattr(Settings.from_env({f"ACTORFLOW_{name}": value, **others}), name.lower())

    assert asked("~/x") == home / "x"
    assert asked("~/x", HOME="/home/ann") == Path("/home/ann/x")
    assert asked("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert asked("x~") == Path("x~")
