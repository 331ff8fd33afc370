"""Whole trainings on many ranks, each a thread of this process, against one rank that does all."""

import numpy as np
import pytest
from jobs import GPT
from rank_trainings import (
    STEPS,
    Net,
    Split,
    Staged,
    Training,
    assert_trained,
    images,
    loss_and_states,
    loss_by_weight,
    on_ranks,
)

import actorflow as af
from actorflow import nn
from actorflow.data import ArraySource, Tokens

pytestmark = pytest.mark.usefixtures("native_toolchain")


def tokens():
    return Tokens(np.arange(2000) % 37, seq=8, batch=6, seed=2)


TRAININGS = {
    "statistics of batches": (Training(), [{"data": 2}, {"data": 3}, {"data": 2, "model": 2}]),
    "masks": (Training(lambda: Net(0.3)), [{"data": 3}]),
    "an uneven batch": (Training(data=lambda: images(7)), [{"data": 2}, {"data": 3}]),
    "several batches": (Training(options={"accumulate": 2}), [{"data": 2}]),
    "several batches, zero": (Training(options={"accumulate": 2, "zero": True}), [{"data": 2}]),
    "several batches by weight": (
        Training(options={"accumulate": 2, "zero": True, "clip_norm": 0.1}, fn=loss_by_weight),
        [{"data": 2}],
    ),
    "several batches by weight, stages": (
        Training(Staged, options={"accumulate": 2}, fn=loss_by_weight),
        [{"stage": 3}, {"stage": 3, "data": 2}],
    ),
    "norms": (Training(options={"clip_norm": 0.1}), [{"data": 2}]),
    "averages": (Training(options={"ema": 0.9}), [{"data": 2}]),
    "averages, zero": (Training(options={"ema": 0.9, "zero": True}), [{"data": 2}]),
    # The average and the step each gather what the other rate gathers, too.
    "averages of several batches, zero": (
        Training(
            options={"ema": 0.9, "zero": True, "accumulate": 2},
            optimizer=af.optim.LAMB(0.003, eps=1e-2),
        ),
        [{"data": 2}],
    ),
    "layers in parts": (Training(Split), [{"model": 2}, {"model": 3}, {"data": 2, "model": 2}]),
    "layers in parts, zero": (Training(Split, options={"zero": True}), [{"data": 2, "model": 2}]),
    "bfloat16": (Training(options={"precision": "bf16"}, near=2e-2), [{"data": 2}]),
    "tokens": (
        Training(
            lambda: GPT(64, seq=8, width=16, layers=1, heads=2), tokens,
            optimizer=af.optim.SGD(0.1),
        ),
        [{"data": 2}, {"data": 3}, {"data": 2, "model": 2}],
    ),
    "tokens, a row for each rank": (
        Training(
            lambda: GPT(64, seq=8, width=16, layers=1, heads=2),
            lambda: Tokens(np.arange(2000) % 37, seq=8, batch=2, seed=2),
            optimizer=af.optim.SGD(0.1),
        ),
        [{"data": 2, "model": 2}],
    ),
    "tokens, zero": (
        Training(
            lambda: GPT(64, seq=8, width=16, layers=1, heads=2), tokens, {"zero": True},
            optimizer=af.optim.SGD(0.1, momentum=0.9),
        ),
        [{"data": 3}],
    ),
}  # fmt: skip


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_come_to_what_one_rank_comes_to(name):
    training, meshes = TRAININGS[name]
    (alone,) = training.run(None)
    for axes in meshes:
        assert_trained(training.run(af.Mesh(**axes)), alone, training.near)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("axes", [{"stage": 3}, {"stage": 3, "data": 2}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("without", [None, 0, 1, 2])
def test_stages_come_to_what_one_rank_comes_to_whichever_has_nothing_to_train(
    without, accumulate, axes
):
    """With numbers over all stages, and outputs of each."""
    options = {"accumulate": accumulate, "clip_norm": 0.1, "zero": "data" in axes}
    training = Training(lambda: Staged(3, without), options=options, fn=loss_and_states)
    skips = {"compiled": {"on_nan": "skip"}, "on_nan": "skip"}
    (alone,) = training.run(None, steps=2, **skips)
    ranks = training.run(af.Mesh(**axes), steps=2, **skips)
    assert_trained(ranks, alone)
    for own in ranks:
        for mine, its in zip(own.told, alone.told, strict=True):
            assert mine.keys() == its.keys() > {"grad_norm", "skipped", "mean0", "most2"}
            for name in its:
                np.testing.assert_allclose(mine[name], its[name], rtol=1e-4, atol=1e-6)


def test_with_zero_every_rank_has_its_part_of_all_state():
    for own in Training(options={"zero": True}).run(af.Mesh(data=2)):
        parts = {v.name: v.sharding for v in own.plan.state}
        assert parts["conv.weight"].shape == (4, 2, 3, 3)
        assert parts["momentum/conv.weight"].splits == (("data", 0),)
        assert parts["step"] is None


@pytest.mark.parametrize("of", ["weight", "bias"])
def test_a_gradient_that_is_updated_in_parts_may_be_read_whole(of):
    """Both are in one bucket: its first launch leaves the terms to the second one."""

    def score(model, batch):
        first, last = model
        value = af.mse_loss(last(af.tanh(first(batch.x))), batch.x)
        (slope,) = af.grad(value, [getattr(first, of)])
        return {"loss": value, "least": af.sort(slope.flatten()).values[:3].sum()}

    def rows():
        x = np.random.default_rng(0).standard_normal((48, 6)).astype(np.float32)
        return ArraySource({"x": x}, batch=6, seed=1)

    def trained(mesh):
        job = af.job(optimizer=af.optim.SGD(0.1), mesh=mesh, zero=mesh is not None)(score)

        def one(group):
            found, layers = [], nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            plan = job.compile(layers, rows(), rank=group.rank)
            af.Runner(plan, group=group).fit(
                rows(), steps=STEPS, progress=False,
                on_step=lambda step, outputs: found.append([outputs["loss"], outputs["least"]]),
            )  # fmt: skip
            return found

        return on_ranks(mesh, one)

    (alone,) = trained(None)
    for own in trained(af.Mesh(data=2)):
        np.testing.assert_allclose(own, alone, rtol=1e-4)


def test_two_runs_of_ranks_are_equal_to_the_bit():
    training, mesh = Training(lambda: Net(0.3)), af.Mesh(data=2)
    one, other = training.run(mesh), training.run(mesh)
    assert [own.losses for own in one] == [own.losses for own in other]


@pytest.mark.parametrize(("first", "then"), [(2, None), (None, 2), (2, 3)])
def test_any_number_of_ranks_goes_on_where_others_stood(first, then, tmp_path):
    (alone,) = Training().run(None, steps=4)
    meshes = [None if count is None else af.Mesh(data=count) for count in (first, then)]
    kept = {"compiled": {"every": 1}, "checkpoint": tmp_path / "run", "every": 1}
    Training().run(meshes[0], steps=2, **kept)
    for own in Training().run(meshes[1], steps=4, **kept):
        assert own.result.first_step == 2
        np.testing.assert_allclose(own.losses, alone.losses[2:], rtol=1e-5)


@pytest.mark.parametrize("zero", [False, True])
def test_ranks_are_stepped_and_read_between_steps(zero):
    (alone,) = Training().run(None)
    job = Training(options={"zero": zero}).job(af.Mesh(data=2))

    def one(group):
        runner = af.Runner(job.compile(Net(), images(), rank=group.rank), group=group)
        data, losses, steps = images(), [], []
        for _ in range(STEPS):
            losses.append(runner.step(next(data))["loss"])
            steps.append(int(runner.variables()["step"]))
        variables = runner.variables()
        runner.close()
        return losses, steps, variables

    for losses, steps, variables in on_ranks(af.Mesh(data=2), one):
        np.testing.assert_allclose(losses, alone.losses, rtol=1e-5)
        assert steps == [1, 2, 3, 4]
        for name, array in variables.items():
            want = alone.result.variables[name]
            np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-6)
