"""Callbacks that are part of a training: checkpoints have what they write, on one rank and on two.

The oracle is the undisturbed run: a run that goes on from any of its checkpoints makes its bits.
"""

import shutil

import pytest
from rank_trainings import on_ranks

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.nn.lease import lease, make_claim, newest

STEPS, EVERY = 8, 2


class Net(nn.Module):
    def __init__(self):
        self.head, self.plateau = nn.Linear(8, 5), nn.Buffer((4,), dtype="float64")

    def __call__(self, x):
        return self.head(x)


def loss(model, batch):
    return {"loss": af.cross_entropy(model(batch.x), batch.y)}


class Halves:
    """Halves a weight whenever it hears of an evaluation, or of some step."""

    is_part_of_training = True

    def on_start(self, run):
        self.model = run.model

    def halve(self):
        self.model.head.weight.data = self.model.head.weight.data / 2


class HalvesAfterEvaluations(Halves):
    def on_evaluation(self, step, means):
        self.halve()


class HalvesAfterSteps(Halves):
    def on_step(self, step, metrics):
        if step % 4 == 0:
            self.halve()


def train(folder, classification, make, steps=STEPS, **options):
    """Train with a callback for the model and return the losses by step."""
    model, losses = Net(), {}
    schedule, callback = make(model)
    watched = af.Evaluation(
        af.job(loss, train=False), classification(seed=7), every=EVERY, batches=1
    )
    job = af.job(optimizer=af.optim.SGD(schedule, momentum=0.9), **options)(loss)
    job.fit(
        model, classification(), steps=steps, checkpoint=folder, every=EVERY, keep_last=100,
        evaluation=watched, callbacks=[callback], progress=False,
        on_step=lambda step, outputs: losses.__setitem__(step, outputs["loss"]),
    )  # fmt: skip
    return losses


def plateau(model):
    one = af.optim.ReduceLROnPlateau(model.plateau, 0.5, factor=0.5, patience=0, threshold=10.0)
    return one, one


MAKERS = {
    "plateau": plateau,
    "evaluations": lambda model: (0.5, HalvesAfterEvaluations()),
    "steps": lambda model: (0.5, HalvesAfterSteps()),
}


def as_killed_after(step, undisturbed, folder):
    """Make a folder of what a run has when it is killed just after a checkpoint is there."""
    shutil.copytree(undisturbed, folder)
    for path in folder.glob("step-*"):
        if int(path.name.split("-")[-1]) > step:
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_run_goes_on_bit_for_bit_from_a_step_whose_callbacks_wrote(
    tmp_path, classification, make
):
    undisturbed = train(tmp_path / "whole", classification, make)
    for step in range(EVERY, STEPS, EVERY):
        folder = as_killed_after(step, tmp_path / "whole", tmp_path / str(step))
        losses = train(folder, classification, make)
        assert losses == {at: value for at, value in undisturbed.items() if at > step}


def test_the_last_checkpoint_is_what_the_model_is_left_with(tmp_path, classification):
    models = []

    def make(model):
        models.append(model)
        return plateau(model)

    train(tmp_path / "run", classification, make)
    saved = CheckpointManager(tmp_path / "run").latest().tensors["plateau"]
    assert (saved == models[0].plateau.data).all()
    assert saved[0] < 0.5


@pytest.mark.usefixtures("native_toolchain")
@pytest.mark.no_gpu("ranks meet in memory of the host")
def test_two_ranks_go_on_bit_for_bit_from_a_step_whose_callbacks_wrote(tmp_path, classification):
    undisturbed, other = train_ranks(tmp_path / "whole", classification)
    assert undisturbed == other
    for step in range(EVERY, STEPS, EVERY):
        folder = as_killed_after(step, tmp_path / "whole", tmp_path / str(step))
        for losses in train_ranks(folder, classification):
            assert losses == {at: value for at, value in undisturbed.items() if at > step}


def train_ranks(folder, classification):
    """Train on two ranks and return the losses of each by step."""
    mesh = af.Mesh(data=2)

    def one(group):
        model, losses = Net(), {}
        schedule, callback = plateau(model)

        def watched():
            source = classification(seed=7)
            return af.Evaluation(af.job(loss, train=False), source, every=EVERY, batches=1)

        job = af.job(optimizer=af.optim.SGD(schedule, momentum=0.9), mesh=mesh)(loss)
        plan = job.compile(
            model, classification(), rank=group.rank, evaluation=watched(), every=EVERY
        )
        cells = model.cells()
        held = lease(cells, make_claim(cells, "fit"))
        af.Runner(plan, values=newest(cells), lease=held, group=group).fit(
            classification(), steps=STEPS, checkpoint=folder, every=EVERY, keep_last=100,
            evaluation=watched(), callbacks=[callback], progress=False,
            on_step=lambda step, outputs: losses.__setitem__(step, outputs["loss"]),
        )  # fmt: skip
        assert model.plateau.data[0] < 0.5
        return losses

    return on_ranks(mesh, one, are_members=True)
