import sys

import pytest

import actorflow as af
from actorflow import nn
from actorflow.cli.main import main
from compiler.contract.types import DType, TensorType


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "job.plan"
    train.compile(nn.Linear(4, 4), {"x": TensorType(DType.FLOAT32, (4, 4))}).save(path)
    return str(path)


def test_a_page_is_written_and_named_with_its_size(plan_file, tmp_path, capsys):
    page = tmp_path / "map.html"
    assert main(["plan", plan_file, "--memory", str(page)]) == 0
    assert f"memory map in {page} (" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_a_second_plan_is_drawn_beside(plan_file, tmp_path):
    page = tmp_path / "map.html"
    assert main(["plan", plan_file, "--memory", str(page), "--without", plan_file]) == 0
    assert '"without recomputation"' in page.read_text()


SCRIPT = """
import actorflow as af
from actorflow import nn
import numpy as np

class Net(nn.Module):
    def __init__(self):
        self.layers = [nn.Linear(16, 16) for _ in range(4)]

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(af.gelu(layer(x), approximate="tanh"))
        return x

@af.job(optimizer=af.optim.SGD(0.1), recompute="blocks")
def train(model, batch):
    return model(batch.x).mean()

train.fit(Net(), af.data.ArraySource({"x": np.zeros((64, 16), np.float32)}, batch=32), steps=1)
"""


def test_a_script_that_recomputes_gets_the_plan_that_stores_all_beside(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "job.py").write_text(SCRIPT)
    assert main(["plan", "job.py", "--memory", "map.html"]) == 0
    page = (tmp_path / "map.html").read_text()
    assert '"with recomputation"' in page
    assert '"without recomputation"' in page
    assert "run again" in capsys.readouterr().out


def test_a_picture_is_written(plan_file, tmp_path):
    pytest.importorskip("PIL", reason="Pillow is not installed: extra cli")
    assert main(["plan", plan_file, "--memory", str(tmp_path / "map.png")]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "map.svg"), "expected a file that ends in .html or .png, came .svg"),
        (("--memory", "map"), "expected a file that ends in .html or .png, came no suffix"),
        (("--memory", "nowhere/map.html"), "nowhere: no such directory"),
        (("--memory", "folder.html"), "folder.html: Is a directory"),
        (("--without", "other.plan"), "it needs --memory FILE.html"),
        (("--memory", "map.html", "--without", "other.plan"), "other.plan: No such file"),
        (("--memory", "map.png", "--without", "other.plan"), "use .html"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    plan_file, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    assert main(["plan", plan_file, *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_missing_pillow_is_told_before_anything_is_compiled(
    plan_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["plan", "nowhere.plan", "--memory", str(tmp_path / "map.png")]) == 1
    assert 'pip install "actorflow[cli]"' in capsys.readouterr().err
