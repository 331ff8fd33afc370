"""`actorflow plan --rank R`: whose plan it is, and how many kinds of them there are."""

import sys

import pytest

from actorflow.cli.main import main

SCRIPT = """
import sys
import numpy as np
import actorflow as af
from actorflow import nn

mesh = {name: int(size) for name, size in [word.split("=") for word in sys.argv[1:]]}

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)

@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(**mesh) if mesh else None)
def train(model, batch):
    return af.mse_loss(model(batch.x), batch.x)

x = np.ones((14, 4), np.float32)
train.fit(Net(), af.data.ArraySource({"x": x}, batch=7), steps=2, progress=False)
"""


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Return a function that runs `plan` and returns its exit code, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["actorflow"])
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)

    def plan(*own, mesh=()):
        code = main(["plan", *own, str(file), *mesh])
        return (code, *capsys.readouterr())

    return plan


@pytest.mark.parametrize(
    ("own", "mesh", "line"),
    [
        ((), ["data=7"], "rank 0 of 7, all of which have this plan"),
        ((), ["data=2"], "rank 0 of 2: it alone has this plan, one of 2 classes of ranks"),
        (["--rank", "2"], ["data=3"], "rank 2 of 3: 2 ranks have this plan, one of 2 classes"),
        (["--rank=1"], ["stage=2"], "rank 1 of 2: it alone has this plan, one of 2 classes"),
    ],
)
def test_the_plan_of_a_rank_says_whose_it_is(planned, own, mesh, line):
    code, out, err = planned(*own, mesh=mesh)
    assert code == 0, err
    assert out.startswith(line)


def test_each_stage_has_a_plan_of_its_own(planned):
    first, second = [planned("--full", "--rank", r, mesh=["stage=2"])[1] for r in ("0", "1")]
    for text, sends in ((first, "send_up"), (second, "send_down")):
        assert [f"chain of {end}" in text for end in ("send_up", "send_down")] == [
            end == sends for end in ("send_up", "send_down")
        ]


def test_a_job_of_one_rank_says_nothing_of_ranks(planned):
    assert planned()[1].startswith("plan 'train'")
    code, _, err = planned("--rank", "1")
    assert code == 1
    assert "script.py:24: rank must be an integer from 0 to 0" in err


def test_a_rank_that_the_mesh_has_not_and_one_of_a_file_are_refused(planned, tmp_path, capsys):
    assert "from 0 to 1, as the job's mesh has 2; got 5" in planned("--rank=5", mesh=["data=2"])[2]
    saved = str(tmp_path / "one.plan")
    assert planned("--save", saved, mesh=["data=2"])[0] == 0
    assert main(["plan", "--rank", "1", saved]) == 1
    assert "is a plan of one rank already" in capsys.readouterr().err


@pytest.mark.parametrize("own", [["-n", "4"], ["-n4"], ["--ranks=4"]])
def test_a_number_of_ranks_as_for_launch_is_none_for_plan(planned, capsys, own):
    with pytest.raises(SystemExit) as ended:
        planned(*own, mesh=["data=4"])
    assert ended.value.code == 2
    assert f"plan needs no {own[0]}: the job's mesh sets the number of ranks." in (
        capsys.readouterr().err
    )
