"""Jobs with a mesh, as users start them: one process for each rank, by `actorflow launch`."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises
from launching import ENOUGH_S, end_of, launcher
from rank_trainings import on_ranks

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.no_gpu("ranks of one host meet in its memory")

SCRIPT = """
import json, os, signal, sys
import numpy as np
import actorflow as af
from actorflow import nn

rank = int(os.environ.get("RANK", 0))

def boom():
    raise RuntimeError("boom")

def stop():
    raise af.StopTraining("enough")

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)

options, asked = eval(sys.argv[1]), eval(sys.argv[2])

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 10)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))

@af.job(optimizer=af.optim.SGD(0.1, momentum=0.9), **options)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

def on_step(step, metrics):
    if asked.get("who") == rank and step == 30:
        asked["how"]()

rng = np.random.default_rng(asked.get("seeds", {}).get(rank, 0))
x = rng.normal(size=(2048, 16)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": x[:, :10].argmax(1).astype(np.int64)}, batch=64)
model, losses = Net(), []
result = train.fit(
    model, data, steps=asked.get("steps", 20), progress=False, checkpoint=asked.get("folder"),
    on_step=lambda step, metrics: (losses.append(float(metrics["loss"])), on_step(step, metrics)),
)
state = {name: array.tobytes().hex() for name, array in sorted(model.state().items())}
with open(f"rank{rank}.json", "w") as file:
    json.dump({"losses": losses, "last": result.last_step, "state": state}, file)
print("rank", rank, "is done")
"""


@pytest.fixture
def start(tmp_path, monkeypatch, native_toolchain):
    monkeypatch.chdir(tmp_path)
    with launcher(tmp_path) as begin:
        yield lambda options, asked="{}", n=2: begin(SCRIPT, options, asked, n=n)


def told(rank):
    with open(f"rank{rank}.json") as file:
        return json.load(file)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process does, which nobody launched, by batches of a step."""
    found, folder = {}, tmp_path_factory.mktemp("alone")
    for each in (1, 4):
        with launcher(folder) as begin:
            process = begin(SCRIPT, f"dict(accumulate={each})", "{}", n=1, cwd=str(folder))
            assert end_of(process)[0] == 0
        found[each] = json.loads((folder / "rank0.json").read_text())
    return found


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("n", "mesh", "more"),
    [
        (2, "data=2", ""),
        (3, "data=3", ", zero=True"),
        (4, "data=2, model=2", ""),
        (2, "data=2", ", zero=True, accumulate=4"),
        (2, "model=2", ", accumulate=4"),
    ],
)
def test_a_job_that_is_launched_trains_as_one_process_does(start, alone, n, mesh, more):
    code, out, err = end_of(start(f"dict(mesh=af.Mesh({mesh}){more})", n=n))
    assert code == 0, err
    assert "rank 0 is done" in out
    expected = alone[4 if "accumulate" in more else 1]["losses"]
    first, *others = [told(rank) for rank in range(n)]
    assert first["losses"] == pytest.approx(expected, rel=1e-5)
    for other in others:
        assert other == first, "bitwise, and after the same step"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_raises_ends_all_with_one_error(start, who):
    asked = f"dict(who={who}, how=boom, steps=5000)"
    code, _, err = end_of(start("dict(mesh=af.Mesh(data=2))", asked))
    assert code == 1
    assert err.count("Traceback") == 1
    assert f"rank {who} of 2 failed" in err
    assert "RuntimeError: boom" in err
    assert not os.path.exists("rank0.json")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_ends_all(start, who):
    asked = f"dict(who={who}, how=kill, steps=5000)"
    code, _, err = end_of(start("dict(mesh=af.Mesh(data=2))", asked))
    assert code == 128 + 9
    assert f"rank {who} was ended by SIGKILL" in err


LEAVING = """
import os
import re
import runpy
import numpy as np
import actorflow as af
from actorflow import nn

@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
def train(model, batch):
    return af.mse_loss(model(batch.x), batch.x)

x = np.ones((64, 8), np.float32)
model, data = nn.Linear(8, 8), af.data.ArraySource({"x": x}, batch=8)
for _ in range(2):
    for number, _ in enumerate(train.stream(model, data)):
        if number == 3:
            break

@af.job(train=False)
def predict(model, batch):
    return {"y": model(batch.x)}

y = predict.step(model, {"x": x[:3]})["y"]
wanted = x[:3] @ model.state()["weight"].T + model.state()["bias"]
print("left", np.allclose(y, wanted, rtol=1e-5), flush=True)
"""


def test_ranks_that_leave_a_loop_over_steps_go_on_together_and_each_may_predict(
    tmp_path, native_toolchain
):
    with launcher(tmp_path) as begin:
        code, out, err = end_of(begin(LEAVING))
    assert (code, out, err) == (0, "left True\n", "")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("who", [0, 1])
def test_a_stop_that_one_rank_asks_for_is_at_one_step_on_all(start, who):
    asked = f"dict(who={who}, how=stop, steps=5000)"
    code, _, err = end_of(start("dict(mesh=af.Mesh(data=2))", asked))
    assert code == 0, err
    ended = {told(rank)["last"] for rank in range(2)}
    assert len(ended) == 1
    assert 30 <= ended.pop() < 5000
    assert told(0) == told(1)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("options", "asked", "text"),
    [
        (
            "dict()",
            "{}",
            "for 1 rank (it has no mesh), and 2 run it; give it one, such",
        ),
        ("dict(mesh=af.Mesh(data=3))", "{}", "for 3 ranks (data=3), and 2 run it; launch 3"),
        ("dict(mesh=af.Mesh(data=2))", "dict(seeds={1: 5})", "rank 1 has other data than"),
        ("dict(mesh=af.Mesh(data=2), seed=int(os.environ['RANK']))", "{}", "rank 1 has seed"),
    ],
)
def test_ranks_that_do_not_do_the_same_job_are_refused(start, options, asked, text):
    code, _, err = end_of(start(options, asked))
    assert code == 1
    assert text in err
    assert "script.py:" in err


def test_a_job_for_several_ranks_says_how_to_launch_it():
    @af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
    def train(model, batch):
        return model(batch.x).mean()

    data = af.data.ArraySource({"x": np.ones((8, 8), np.float32)}, batch=8)
    with raises(af.CompileError):
        train.fit(nn.Linear(8, 8), data, steps=1, progress=False)


def test_a_run_goes_on_from_the_checkpoint_of_its_first_rank(start, alone):
    for steps in (12, 20):
        asked = f"dict(folder='run', steps={steps})"
        code, _, err = end_of(start("dict(mesh=af.Mesh(data=2))", asked))
        assert code == 0, err
    assert told(0) == told(1)
    assert told(0)["losses"] == pytest.approx(alone[1]["losses"][12:], rel=1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("n", "chosen", "mesh"),
    [
        (4, ["--model", "2", "--zero"], "stage=1 x data=2 x model=2"),
        (2, ["--stage", "2", "--accumulate", "2"], "stage=2 x data=1 x model=1"),
    ],
)
def test_the_example_of_many_ranks_runs_on_as_many(tmp_path, native_toolchain, n, chosen, mesh):
    script = Path(__file__).resolve().parents[2] / "examples" / "ranks.py"
    png = tmp_path / "loss.png"
    asked = [*chosen, "--steps", "2", "--batch", "4", "--png", str(png)]
    command = [sys.executable, "-m", "actorflow", "launch", "-n", str(n), str(script), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH_S, check=False)
    assert done.returncode == 0, done.stderr
    assert f"loss of step 2 on {mesh}" in done.stdout
    assert png.exists()


COMPILES = """
import json, os, sys
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.distributed import agreed_plan as agreeing

rank, asked = int(os.environ["RANK"]), eval(sys.argv[1])
os.environ.update(asked.get("environ", {}).get(rank, {}))
compiled, really = [], agreeing.compiled_plan
agreeing.compiled_plan = lambda *given: compiled.append(given) or really(*given)

@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=3))
def train(model, batch):
    return (model(batch.x) ** 2).mean()

def rows(count):
    return np.linspace(-1, 1, count * 4, dtype=np.float32).reshape(count, 4)

def counted():
    done, compiled[:] = len(compiled), []
    return done

model, counts = nn.Linear(4, 4), []
for count in (6, 3, 6, 4):
    train.step(model, {"x": rows(count)})
    counts.append(counted())
train.close(model)
for steps in (2, 4):
    data = af.data.ArraySource({"x": rows(48)}, batch=12)
    train.fit(model, data, steps=steps, progress=False)
    counts.append(counted())
with open(f"rank{rank}.json", "w") as file:
    json.dump({"counts": counts, "weight": model.state()["weight"].tobytes().hex()}, file)
"""


def test_ranks_that_share_a_plan_have_it_from_one_of_them(tmp_path, monkeypatch, native_toolchain):
    monkeypatch.chdir(tmp_path)
    with launcher(tmp_path) as begin:
        environ = {"ACTORFLOW_CACHE": str(tmp_path / "cache"), "ACTORFLOW_NATIVE": "1"}
        code, _, err = end_of(begin(COMPILES, "{}", n=3, **environ))
    assert code == 0, err
    ranks = [told(rank) for rank in range(3)]
    # Four rows are uneven: the first rank has two. The second `fit` has the plan of the first.
    always, uneven, never = [1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0] * 6
    assert [own["counts"] for own in ranks] == [always, uneven, never]
    assert {own["weight"] for own in ranks} == {ranks[0]["weight"]}


def test_a_rank_with_other_kernels_is_refused_on_all(tmp_path, native_toolchain):
    """What ranks have in common would part by and by."""
    asked = {"environ": {1: {"ACTORFLOW_NATIVE": "0"}}}
    with launcher(tmp_path) as begin:
        environ = {"ACTORFLOW_CACHE": str(tmp_path / "cache"), "ACTORFLOW_NATIVE": "1"}
        code, _, err = end_of(begin(COMPILES, repr(asked), n=3, **environ))
    assert code == 1
    assert "the plan of rank 1 is for 'host-" in err
    assert "set ACTORFLOW_NATIVE alike" in err


BITS = """
import os
import re
import runpy
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.table, self.drop = nn.Embedding(30, 16), nn.Dropout(0.1)
        self.block = nn.TransformerBlock(16, heads=2, causal=True, sbp={"model": af.split(0)})
        self.head = nn.Linear(16, 30)

    def __call__(self, x):
        return self.head(self.drop(self.block(self.table(x))))

@af.job(
    optimizer=af.optim.AdamW(1e-2), mesh=af.Mesh(data=2, model=2), zero=True, clip_norm=1.0,
    deterministic=True,  # processes and threads would each choose libraries by their own times
)
def train(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

def data():
    return af.data.Tokens(np.arange(500) ** 2 % 29, seq=8, batch=6, seed=1)

if __name__ == "__main__":
    result = train.fit(Net(), data(), steps=5, progress=False)
    if os.environ["RANK"] == "0":
        np.savez("state.npz", **result.variables)
"""


def test_processes_come_to_the_bits_of_threads(tmp_path, native_toolchain):
    with launcher(tmp_path) as begin:
        code, _, err = end_of(begin(BITS, n=4))
    assert code == 0, err
    job = runpy.run_path(str(tmp_path / "script.py"))

    def one(group):
        plan = job["train"].compile(job["Net"](), job["data"](), rank=group.rank)
        return af.Runner(plan, group=group).fit(job["data"](), steps=5, progress=False).variables

    with np.load(tmp_path / "state.npz") as state:
        for found in on_ranks(af.Mesh(data=2, model=2), one):
            assert {*found} == {*state}
            for name, array in found.items():
                np.testing.assert_array_equal(array, state[name], strict=True, err_msg=name)


STEPPED = """
import json, os, sys
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 3)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)

mesh = af.Mesh(stage=2) if "RANK" in os.environ else None

@af.job(optimizer=af.optim.Adam(1e-2), mesh=mesh)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(12, 8) ** 3
batch, model, seen = {"x": x, "y": np.arange(12) % 3}, Net(), []
for _ in range(3):
    train.step(model, batch)
    seen.append({name: array.tolist() for name, array in model.state().items()})
train.close(model)
seen.append({name: array.tolist() for name, array in model.state().items()})
with open(f"rank{os.environ.get('RANK')}.json", "w") as file:
    json.dump(seen, file)
if mesh is not None:
    data = af.data.ArraySource(batch, batch=12)
    train.fit(model, data, steps=2, progress=False, on_step=lambda *_: model.state())
"""


def test_between_steps_all_ranks_read_what_any_stage_has(tmp_path, monkeypatch, native_toolchain):
    """In a run that goes on they would be at different steps, which is said."""
    monkeypatch.chdir(tmp_path)
    with launcher(tmp_path) as begin:
        code, _, err = end_of(begin(STEPPED))
    assert code == 1
    assert re.search(
        r"'(up|down)\.weight' is read while plan 'train' runs on 2 ranks, which may be at", err
    ), err
    subprocess.run([sys.executable, "script.py"], check=True)
    alone = told(None)
    for rank in range(2):
        for own, wanted in zip(told(rank), alone, strict=True):
            assert {*own} == {*wanted}
            for name in wanted:
                np.testing.assert_allclose(own[name], wanted[name], rtol=1e-5, atol=1e-7)
