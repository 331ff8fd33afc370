"""Variables that are slices of whole tensors: what they begin with, and what a checkpoint holds."""

from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.initialise import initial_values
from actorflow.run.saving import expected_of
from compiler.errors import CompileError, InternalError
from compiler.plan import Plan
from compiler.types import DType, SliceOf, TensorType
from compiler.verify import verify_plan


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()


def compiled(**options):
    return train.compile(nn.Linear(6, 4), {"x": TensorType(DType.FLOAT32, (2, 6))}, **options)


def sliced(plan, offsets, whole=(12, 6)):
    """Return the plan of a rank that has four rows of a weight with more."""
    variables = [
        replace(v, slice_of=SliceOf(whole, offsets)) if v.name == "weight" else v
        for v in plan.variables
    ]
    return replace(plan, variables=tuple(variables))


@pytest.fixture(scope="module")
def plan():
    return compiled()


def test_ranks_begin_with_the_slices_of_one_tensor_however_many_they_are(plan):
    parts = [initial_values(sliced(plan, (row, 0)), {}, 7)["weight"] for row in (0, 4, 8)]
    (variable,) = [v for v in plan.variables if v.name == "weight"]
    whole = replace(plan, variables=(replace(variable, slice_of=SliceOf((12, 6), (0, 0))),))
    assert [part.shape for part in parts] == [(4, 6)] * 3
    halves = [initial_values(sliced(plan, (row, 0)), {}, 7)["weight"] for row in (2, 6)]
    np.testing.assert_array_equal(np.concatenate(parts)[2:10], np.concatenate(halves))
    np.testing.assert_array_equal(initial_values(whole, {}, 7)["weight"], parts[0])
    assert not np.array_equal(parts[0], parts[1])


def test_a_whole_tensor_is_cut_and_a_slice_is_taken_as_it_is(plan):
    rank = sliced(plan, (8, 0))
    whole = np.arange(72, dtype=np.float32).reshape(12, 6)
    cut = initial_values(rank, {"weight": whole}, 0)["weight"]
    np.testing.assert_array_equal(cut, whole[8:])
    assert cut.flags.c_contiguous
    np.testing.assert_array_equal(initial_values(rank, {"weight": cut}, 0)["weight"], cut)
    with pytest.raises(CompileError, match=r"'weight' is float32\[4, 6\] .* got float32\[11, 6\]"):
        initial_values(rank, {"weight": whole[1:]}, 0)


def test_a_checkpoint_is_expected_to_hold_the_whole_by_its_name(plan):
    assert expected_of(sliced(plan, (4, 0))).tensors["weight"] == "float32[12, 6]"
    assert expected_of(plan).tensors["weight"] == "float32[4, 6]"


def test_a_rank_trains_on_from_whole_tensors(plan):
    whole = np.linspace(-1, 1, 72, dtype=np.float32).reshape(12, 6)
    bias = np.zeros(4, np.float32)
    batch = {"x": np.ones((2, 6), np.float32)}
    losses = []
    for rank, weight in ((sliced(plan, (4, 0)), whole), (plan, whole[4:8])):
        runner = af.Runner(rank, values={"weight": weight, "bias": bias})
        losses.append([float(runner.step(batch)["loss"]) for _ in range(3)])
        runner.close()
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == 3


def test_a_slice_outlives_a_file(plan, tmp_path):
    rank = sliced(plan, (4, 0))
    rank.save(tmp_path / "rank.plan")
    assert Plan.load(tmp_path / "rank.plan") == rank
    verify_plan(rank)


@pytest.mark.parametrize(("offsets", "whole"), [((9, 0), (12, 6)), ((0,), (12,)), ((0, 1), (4, 6))])
def test_a_slice_that_the_whole_does_not_hold_is_a_bug(plan, offsets, whole):
    with pytest.raises(InternalError, match=r"'weight' is float32\[4, 6\], and no slice of"):
        verify_plan(sliced(plan, offsets, whole))


def test_a_checkpoint_of_slices_is_refused():
    rank = sliced(compiled(every=5), (4, 0))
    with pytest.raises(CompileError, match="a slice of 'weight' and writes checkpoints, which"):
        af.Runner(rank)
