"""A run goes on from the checkpoint of any other mesh, with or without ZeRO: 20 further steps."""

import json
import shutil

import pytest
from launching import end_of, launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks of one host meet in its memory"),
]

SCRIPT = """
import json, os, sys
import numpy as np
import actorflow as af
from actorflow import nn

options, runs, steps = eval(sys.argv[1]), eval(sys.argv[2]), int(sys.argv[3])

class Net(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(32, 12)
        self.up = nn.Linear(12, 18, sbp={"model": af.split(0)})
        self.down = nn.Linear(18, 10, sbp={"model": af.split(1)})

    def __call__(self, x):
        return self.down(af.tanh(self.up(self.table(x))))

@af.job(optimizer=af.optim.AdamW(1e-3), **options)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

x = np.random.default_rng(0).integers(0, 32, 480)
losses = {}
for run in runs:
    losses[run] = {}
    data = af.data.ArraySource({"x": x, "y": x % 10}, batch=12, seed=2)
    train.fit(
        Net(), data, steps=steps, progress=False, checkpoint=run, every=steps,
        on_step=lambda step, metrics: losses[run].update({step: float(metrics["loss"])}),
    )
if os.environ["RANK"] == "0":
    with open(f"{runs[0]}.json", "w") as file:
        json.dump(losses, file)
"""

SHAPES = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (2, 2)}
LAYOUTS = [(name, zero) for name in SHAPES for zero in (False, True) if (name, zero) != ("1", True)]
BEFORE, AFTER = 5, 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return what trains some runs on a mesh, in one set of processes, and returns their losses."""
    folder = tmp_path_factory.mktemp("reshard")

    def train(layout, runs, steps):
        (data, model), zero = SHAPES[layout[0]], layout[1]
        options = f"dict(mesh=af.Mesh(data={data}, model={model}), zero={zero})"
        with launcher(folder) as start:
            process = start(SCRIPT, options, repr(runs), str(steps), n=data * model)
            code, out, err = end_of(process)
        assert code == 0, f"{out}\n{err}"
        told = json.loads((folder / f"{runs[0]}.json").read_text())
        return {run: {int(step): loss for step, loss in told[run].items()} for run in runs}

    return folder, train


@pytest.fixture(scope="module")
def sources(trained):
    """Return the run directories of a few steps on each mesh, and the losses of one process."""
    folder, train = trained
    straight = train(LAYOUTS[0], ["straight"], BEFORE + AFTER)["straight"]
    runs = [f"from-{name}-{zero}" for name, zero in LAYOUTS]
    for layout, run in zip(LAYOUTS, runs, strict=True):
        train(layout, [run], BEFORE)
    return folder, runs, straight


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1]}")
def test_a_mesh_goes_on_from_what_each_other_one_saved(trained, sources, layout):
    folder, runs, straight = sources
    copies = [f"{layout[0]}-{layout[1]}-{run}" for run in runs]
    for run, copy in zip(runs, copies, strict=True):
        shutil.copytree(folder / run, folder / copy)
    losses = trained[1](layout, copies, BEFORE + AFTER)
    further = {step: loss for step, loss in straight.items() if step > BEFORE}
    assert len(further) == AFTER
    for copy in copies:
        assert losses[copy] == pytest.approx(further, rel=1e-5), copy
