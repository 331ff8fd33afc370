"""Checkpoints of ranks that have parts of the variables, or those of a stage: one whole file."""

import json
import threading

import numpy as np
import pytest
from rank_trainings import Split, Training

import actorflow as af
from actorflow import nn
from actorflow.distributed import sharded_save
from actorflow.distributed.sharded_save import SaveVotes
from actorflow.run.broken_steps import NonFiniteLoss

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]


class Staged(nn.Module):
    """A layer on each of two stages."""

    def __init__(self):
        self.up, self.out = nn.Linear(128, 16), nn.Linear(16, 5)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(af.flatten(x, 1)))
        with af.stage(1):
            return self.out(h)


class Scalars(nn.Module):
    """The later stage has variables without axes: a scale, a count of batches, a seed of masks."""

    def __init__(self, drop=0.0):
        self.up, self.norm, self.out = nn.Linear(128, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.scale, self.drop = nn.Parameter((), (("kind", "ones"),)), drop

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(af.flatten(x, 1)))
        with af.stage(1):
            h = self.norm(h)
            return self.out(af.dropout(h, self.drop) if self.drop else h) * self.scale


ADAM = {"optimizer": af.optim.AdamW(1e-2)}
CASES = {
    "model": (Training(Split), {"model": 2}),
    "uneven": (Training(Split), {"model": 3}),
    "zero": (Training(options={"zero": True, "ema": 0.9}, **ADAM), {"data": 2}),
    "zero, uneven": (Training(options={"zero": True}, **ADAM), {"data": 3}),
    "data and model": (Training(Split, options={"zero": True}), {"data": 2, "model": 2}),
    "stages": (Training(Staged), {"stage": 2}),
    "stages and data": (Training(Staged, options={"accumulate": 2}), {"stage": 2, "data": 2}),
    "batches": (Training(options={"zero": True, "accumulate": 2}), {"data": 2}),
    "scalars of a stage": (Training(Scalars, **ADAM), {"stage": 2}),
    "masks of a stage": (Training(lambda: Scalars(0.2), **ADAM), {"stage": 2}),
    "averages of a stage": (Training(Scalars, options={"ema": 0.9}, **ADAM), {"stage": 2}),
    "scalars of a stage, zero": (
        Training(Scalars, options={"zero": True}, **ADAM), {"stage": 2, "data": 2},
    ),
    "scalars of a stage, batches": (
        Training(Scalars, options={"accumulate": 2}), {"stage": 2},
    ),
}  # fmt: skip
KEPT = {"compiled": {"every": 2}, "every": 2}


def saved(folder):
    """Return step and content hashes of the newest checkpoint."""
    text = (max(folder.glob("step-*")) / "manifest.json").read_text()
    manifest = json.loads(text.splitlines()[0])
    pieces = [(p["tensor"], p["offset"], p["xxh3_128"]) for p in manifest["pieces"]]
    return manifest["step"], sorted(pieces)


def variables_of(ranks):
    return {name: array.tobytes() for name, array in ranks[0].result.variables.items()}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CASES)
def test_ranks_go_on_to_the_bit_where_they_stood(name, tmp_path):
    training, axes = CASES[name]
    mesh = af.Mesh(**axes)
    straight = training.run(mesh, steps=6, checkpoint=tmp_path / "straight", **KEPT)
    training.run(mesh, steps=3, checkpoint=tmp_path / "broken", **KEPT)
    assert saved(tmp_path / "broken")[0] == 3
    resumed = training.run(mesh, steps=6, checkpoint=tmp_path / "broken", **KEPT)
    for own, before in zip(resumed, straight, strict=True):
        assert own.result.first_step == 3
        assert own.losses == before.losses[3:]
    assert variables_of(resumed) == variables_of(straight)
    assert saved(tmp_path / "broken") == saved(tmp_path / "straight")
    assert {n for n, *_ in saved(tmp_path / "broken")[1]} == {*resumed[0].result.variables}


@pytest.mark.parametrize(
    ("name", "other"), [("data and model", {"data": 3, "model": 1}), ("stages", {"data": 2})]
)
def test_one_process_and_other_meshes_go_on_from_it_and_the_other_way_round(name, other, tmp_path):
    training, axes = CASES[name]
    (alone,) = training.run(None, steps=6)
    meshes = [af.Mesh(**axes), None, af.Mesh(**other), af.Mesh(**axes)]
    for number, mesh in enumerate(meshes):
        steps = number + 2
        for own in training.run(mesh, steps=steps, checkpoint=tmp_path / "run", **KEPT):
            assert own.result.first_step == (number + 1 if number else 0)
            want = alone.losses[own.result.first_step : steps]
            np.testing.assert_allclose(own.losses, want, rtol=1e-5)
        assert saved(tmp_path / "run")[0] == steps


def test_a_checkpoint_of_ranks_is_the_one_that_their_variables_make(tmp_path):
    training, axes = CASES["zero"]
    ranks = training.run(af.Mesh(**axes), checkpoint=tmp_path / "run", **KEPT)
    from actorflow.checkpoint.manager import CheckpointManager

    loaded = CheckpointManager(tmp_path / "run").latest()
    for own in ranks:
        assert own.result.variables.keys() == loaded.tensors.keys()
        for name, array in loaded.tensors.items():
            np.testing.assert_array_equal(own.result.variables[name], array, err_msg=name)


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Return what trains two ranks until both see a loss at step 4 that is not finite.

    It takes the way to the votes of a checkpoint, and returns the folder of the run.
    """
    x = np.ones((72, 2, 8, 8), np.float32)
    x[24:32] = np.inf
    table = {"x": x, "y": np.zeros(72, int)}
    training = Training(data=lambda: af.data.ArraySource(table, batch=8, shuffle=False))

    def run(votes):
        monkeypatch.setattr(sharded_save, "SaveVotes", votes)
        with pytest.raises(NonFiniteLoss, match="loss is nan at step 4"):
            training.run(af.Mesh(data=2), steps=9, checkpoint=tmp_path / "run", **KEPT)
        return tmp_path / "run"

    return run


def test_a_run_that_fails_while_its_checkpoint_waits_for_a_vote_ends(failing):
    class Votes(SaveVotes):
        """Of a rank that votes only once it has heard of the failure.

        Before that it may be waiting, in a collective, for the very rank that has failed.
        """

        def __init__(self, *args):
            super().__init__(*args)
            self.is_stopped = threading.Event()

        def stop(self, why):
            super().stop(why)
            self.is_stopped.set()

        def hurry(self, why):
            super().hurry(why, wait_s=0.01)

        def wait_begun(self, step):
            assert self.is_stopped.wait(60)
            return super().wait_begun(step)

    assert not [*failing(Votes).glob("step-*")]


def test_a_checkpoint_that_all_ranks_are_writing_outlives_a_failure(failing):
    failed, have_all = set(), threading.Event()

    class Votes(SaveVotes):
        """Of a rank that votes once both ranks have failed."""

        def hurry(self, why):
            super().hurry(why)
            failed.add(self)
            if len(failed) == 2:
                have_all.set()

        def wait_begun(self, step):
            assert have_all.wait(60)
            return super().wait_begun(step)

    assert saved(failing(Votes))[0] == 2
