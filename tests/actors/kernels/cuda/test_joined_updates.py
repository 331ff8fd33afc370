"""Updates of many variables by one kernel: the bits of each alone, and the numbers of the rule."""

import numpy as np
import pytest
from emulated_run import type_of

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.fused import _WAY, joined_text, most_joined
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.cuda.loops import NARROW, WIDE
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, to_bits
from compiler.graph.registry import find_op, infer_type, reference
from compiler.ops.language.define import update
from compiler.passes.precision import with_rounded

GPU = gpu_named("h200")
ALONE, JOINED = kernels_on(GPU)["cuda.fused"], kernels_on(GPU)["cuda.joined_updates"]
DECAY = {"weight_decay": 0.1}
RULES = {
    # op -> what it writes over, by operand; its numbers; its attributes
    "sgd_update": ((0,), (0.1,), DECAY),
    "momentum_update": ((0, 2), (0.1,), DECAY | {"momentum": 0.9, "nesterov": True}),
    "adamw_update": ((0, 2, 3), (0.01, 4), DECAY | {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}),
}
SHAPES = ((5, 7), (), (0, 3), (1,), (3, 2049), (2048,), (1, 0), (2049,))


def typed(array):
    return TensorType(DType(array.dtype.name), array.shape)


def case(rule, shapes, dtype="float32", seed=1):
    """Return attributes, the operands of each member, and the numbers of a rule."""
    over, numbers, attrs = RULES[rule]
    rng = np.random.default_rng(seed)
    members = [
        [np.asarray(np.abs(rng.normal(size=shape)), dtype) for _ in range(len(over) + 1)]
        for shape in shapes
    ]
    scalars = [np.array(x, np.int64 if isinstance(x, int) else dtype) for x in numbers]
    types = tuple([typed(x) for x in (*members[0], *scalars)])
    program = update.get(find_op(rule)).program_for(types, Attrs(attrs))
    return {"program": program, "over": over, "count": len(shapes)}, members, scalars


def in_order(over, members, scalars):
    """Return the operands as the op has them: what is written over, the gradients, the numbers."""
    return (*[m[i] for m in members for i in over], *[m[1] for m in members], *scalars)


def joined(emulated_run, attrs, members, scalars, **more):
    inputs = in_order(attrs["over"], members, scalars)
    results = [typed(x) for x in inputs[: len(members) * len(attrs["over"])]]
    pairs = tuple([(k, k) for k in range(len(results))])
    return emulated_run(JOINED, attrs, inputs, results, in_place=pairs, **more).outputs


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES)
def test_every_member_has_the_bits_of_an_update_alone(rule, dtype, emulated_run):
    attrs, members, scalars = case(rule, SHAPES, dtype)
    found = joined(emulated_run, attrs, members, scalars, offset_bytes=8)
    over = attrs["over"]
    for number, member in enumerate(members):
        own = {"program": attrs["program"], "rows": 1, "columns": member[0].size}
        pairs = tuple(enumerate(over))
        flat = [np.atleast_1d(x.reshape(-1)) for x in member]
        results = tuple([typed(flat[i]) for i in over])
        alone = emulated_run(ALONE, own, (*flat, *scalars), results, in_place=pairs).outputs
        for k, expected in enumerate(alone):
            got = found[number * len(over) + k]
            np.testing.assert_array_equal(got.reshape(-1), expected)


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_is_the_rule_member_by_member(rule):
    attrs, members, scalars = case(rule, SHAPES)
    op, over = find_op("joined_updates"), attrs["over"]
    inputs = in_order(over, members, scalars)
    made = reference.get(op)(Attrs(attrs), *inputs)
    types = infer_type.get(op)(tuple([typed(x) for x in inputs]), Attrs(attrs))
    assert types == tuple([typed(x) for x in made])
    for number, member in enumerate(members):
        expected = reference.get(find_op(rule))(Attrs(RULES[rule][2]), *member, *scalars)
        for got, one in zip(made[number * len(over) :], expected, strict=False):
            np.testing.assert_array_equal(got, one)


@pytest.mark.parametrize("skip", [0, 1])
def test_a_step_that_is_skipped_changes_none(skip, emulated_run):
    attrs, members, scalars = case("sgd_update", SHAPES)
    found = joined(emulated_run, attrs, members, [*scalars, np.array(skip)])
    same = [np.array_equal(x, m[0]) for x, m in zip(found, members, strict=True) if m[0].size]
    assert set(same) == {bool(skip)}


def test_as_many_as_the_arguments_hold_are_one_kernel_and_more_are_not_taken(emulated_run):
    most = most_joined(2)
    attrs, members, scalars = case("sgd_update", [(1,)] * most)
    for got, (p, g) in zip(joined(emulated_run, attrs, members, scalars), members, strict=True):
        np.testing.assert_allclose(got, p - 0.1 * (g + 0.1 * p), rtol=1e-6)
    many = attrs | {"count": most + 1}
    inputs = in_order((0,), [*members, members[0]], scalars)
    given = tuple([Operand(typed(x), 0, x.strides) for x in inputs])
    assert JOINED.plan(many, given, given[: most + 1]) is None


def test_a_gradient_that_is_not_dense_is_not_taken():
    attrs, members, scalars = case("sgd_update", [(3, 4)])
    members[0][1] = members[0][1].T.copy().T
    given = [Operand(typed(x), 0, x.strides) for x in in_order((0,), members, scalars)]
    assert JOINED.plan(attrs, tuple(given), tuple(given[:1])) is None


def test_updates_go_16_bytes_at_a_time_where_all_members_begin_so(emulated_run):
    attrs, members, scalars = case("adamw_update", SHAPES)
    inputs = in_order(attrs["over"], members, scalars)
    results = [typed(x) for x in inputs[: len(members) * len(attrs["over"])]]
    found = {}
    for offset_bytes, way in ((0, WIDE), (4, NARROW)):
        given = {"in_place": tuple([(k, k) for k in range(len(results))])}
        made = emulated_run(JOINED, attrs, inputs, results, offset_bytes=offset_bytes, **given)
        assert made.calls[0].words[_WAY] == way
        found[way] = [x.tobytes() for x in made.outputs]
    assert found[WIDE] == found[NARROW]


def test_an_update_writes_its_variable_in_bfloat16_with_the_bits_of_a_cast(emulated_run):
    attrs, members, scalars = case("adamw_update", SHAPES)
    over, program = attrs["over"], with_rounded(attrs["program"])
    rounded = attrs | {"program": program, "over": (*over, len(attrs["program"].inputs))}
    alone = joined(emulated_run, attrs, members, scalars)
    inputs = [
        array
        for member in members
        for array in (*[member[i] for i in over], np.full(member[0].shape, 7, np.uint16))
    ]
    count, every = len(inputs), len(over) + 1
    given = (*inputs, *[member[1] for member in members], *scalars)
    results = [type_of(x) for x in inputs]
    pairs = tuple([(k, k) for k in range(count)])
    found = emulated_run(JOINED, rounded, given, results, in_place=pairs).outputs
    for number in range(len(members)):
        *own, low = found[number * every : (number + 1) * every]
        for got, expected in zip(own, alone[number * len(over) :], strict=False):
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(low, to_bits(own[0]))


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_the_kernel_keeps_all_in_registers(arch):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed: it comes with actorflow[cuda]")
    attrs, _, _ = case("adamw_update", SHAPES)
    for program, over in (
        (attrs["program"], attrs["over"]),
        (with_rounded(attrs["program"]), (*attrs["over"], len(attrs["program"].inputs))),
    ):
        (used,) = nvrtc.usage(joined_text(program, over), arch=arch).values()
        assert (used.spilled_bytes, used.stack_bytes) == (0, 0)
        assert used.registers <= 96
