"""Variables that are parts of whole tensors: what they begin with, and what a checkpoint holds."""

from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.compile.prove import prove
from actorflow.run.restoring import expected_of
from actorflow.tensor.initial_values import INITIALISERS, initial_value, initial_values
from compiler.contract.errors import CompileError, InternalError, PlanFormatError
from compiler.contract.placement import Mesh
from compiler.contract.plan import Plan
from compiler.contract.sbp import shard_slices
from compiler.contract.types import DType, ShardingSpec, TensorType
from compiler.verify.verify import verify_plan

MESH = Mesh(("data", "model"), (2, 3))
BY_MODEL = ShardingSpec((12, 6), (("model", 0),))


@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()


def compiled(**options):
    return train.compile(nn.Linear(6, 4), {"x": TensorType(DType.FLOAT32, (2, 6))}, **options)


def with_part(plan, part, mesh=MESH):
    """Return the plan of ranks that have four rows of a weight with more."""
    variables = [replace(v, sharding=part) if v.name == "weight" else v for v in plan.variables]
    option = ("mesh", tuple(zip(mesh.names, mesh.shape, strict=True)))
    return replace(plan, variables=tuple(variables), options=(*plan.options, option))


@pytest.fixture(scope="module")
def plan():
    return compiled()


def test_ranks_begin_with_the_parts_of_one_tensor_however_many_they_are(plan):
    rank_plan = with_part(plan, BY_MODEL)
    (variable,) = [v for v in plan.variables if v.name == "weight"]
    whole = initial_value("weight", TensorType(DType.FLOAT32, (12, 6)), variable.init, 7)
    for rank in range(MESH.num_ranks):
        part = initial_values(rank_plan, {}, 7, rank)["weight"]
        np.testing.assert_array_equal(part, whole[shard_slices(BY_MODEL, MESH, rank)])
    assert not np.array_equal(whole[:4], whole[4:8])


SPECS = {
    "zeros": {}, "ones": {}, "seed": {}, "constant": {"value": 2.5}, "uniform": {"bound": 0.3},
    "normal": {"std": 2.0, "zero_row": 4}, "orthogonal": {"gain": 1.5}, "dirac": {"groups": 2},
    "truncated_normal": {"std": 1.0, "low": -0.2, "high": 2.0, "mean": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (301, 300, 3)], ids=str)
def test_a_part_of_a_first_value_has_the_bits_of_the_whole(kind, shape):
    type_, spec = TensorType(DType.FLOAT32, shape), tuple({"kind": kind, **SPECS[kind]}.items())
    whole = initial_value("w", type_, spec, 3)
    mesh = Mesh(("a", "b", "c"), (2, 3, 2))
    for splits in ((("a", 0),), (("b", 1),), (("a", 0), ("c", 0)), (("a", 2), ("b", 0), ("c", 1))):
        for rank in (0, 5, 11):
            own = shard_slices(ShardingSpec(shape, splits), mesh, rank)
            part = initial_value("w", type_, spec, 3, own)
            assert part.flags.c_contiguous
            np.testing.assert_array_equal(part, whole[own])


def test_all_initialisers_are_asked_for_parts():
    assert {*SPECS, "given", "numbers"} == {*INITIALISERS}


def test_what_is_given_is_the_whole_and_is_cut(plan):
    rank_plan, whole = with_part(plan, BY_MODEL), np.arange(72, dtype=np.float32).reshape(12, 6)
    cut = initial_values(rank_plan, {"weight": whole}, 0, rank=5)["weight"]
    np.testing.assert_array_equal(cut, whole[8:])
    assert cut.flags.c_contiguous
    for wrong in (cut, whole[1:], whole.astype(np.float64)):
        with raises(CompileError):
            initial_values(rank_plan, {"weight": wrong}, 0, rank=5)


def test_a_checkpoint_is_expected_to_hold_the_whole_by_its_name(plan):
    assert expected_of(with_part(plan, BY_MODEL)).tensors["weight"] == "float32[12, 6]"
    assert expected_of(plan).tensors["weight"] == "float32[4, 6]"


def test_a_plan_of_parts_outlives_a_file_and_says_no_rank(plan, tmp_path):
    rank_plan = with_part(plan, BY_MODEL)
    rank_plan.save(tmp_path / "rank.plan")
    found = Plan.load(tmp_path / "rank.plan")
    assert found == rank_plan
    assert found.mesh == MESH
    assert plan.mesh == Mesh((), ())
    verify_plan(found)
    prove(found)


@pytest.mark.parametrize(
    "part",
    [
        ShardingSpec((12, 6), (("data", 0),)),
        ShardingSpec((12, 6), (("stage", 0),)),
        ShardingSpec((12, 6), (("model", 0), ("model", 0))),
        ShardingSpec((12, 6), (("model", 2),)),
        ShardingSpec((12, 6, 1), (("model", 0),)),
        ShardingSpec((4, 6), ()),
    ],
    ids=str,
)
def test_a_part_that_no_rank_has_is_a_bug_and_a_damaged_file(plan, part):
    wrong = with_part(plan, part)
    with raises(InternalError):
        verify_plan(wrong)
    with raises(PlanFormatError):
        Plan.from_bytes(wrong.to_bytes())


def test_a_field_of_a_part_is_checked_alike(plan):
    whole = ShardingSpec((4, 6), (("data", 0),))
    fields = [replace(f, sharding=whole) if f.name == "x" else f for f in plan.fields]
    right = with_part(replace(plan, fields=tuple(fields)), None)
    verify_plan(right)
    wrong = with_part(replace(right, options=plan.options), None, Mesh(("data",), (4,)))
    with raises(InternalError):
        verify_plan(wrong)


def test_a_mesh_of_more_ranks_than_there_can_be_is_refused(plan):
    with raises(InternalError):
        verify_plan(with_part(plan, None, Mesh(("data", "model"), (2, 10**11))))


@pytest.mark.parametrize(
    "mesh", ["data", (("data",),), (("data", 0),), ((2, 2),), 3,
             (("data", 2), ("data", 2))]
)  # fmt: skip
def test_an_option_that_is_no_mesh_is_a_damaged_file(plan, mesh):
    wrong = replace(plan, options=(*plan.options, ("mesh", mesh)))
    with raises(PlanFormatError):
        Plan.from_bytes(wrong.to_bytes())


def test_numbers_of_rows_begin_where_the_part_does():
    type_, spec = TensorType(DType.INT64, (7,)), (("kind", "numbers"),)
    np.testing.assert_array_equal(initial_value("n", type_, spec, 0), np.arange(7))
    np.testing.assert_array_equal(initial_value("n", type_, spec, 3, (slice(4, 6),)), [4, 5])
