"""Which casts of parameters their updates write; the program still makes what it made."""

import numpy as np
import pytest
from graphs import Target, variable

from compiler.contract.spaces import Space
from compiler.contract.types import DType
from compiler.fusion.join_updates import update_programs
from compiler.graph.graph import GraphBuilder, Output, Write, prune
from compiler.graph.target import one_device
from compiler.ops.families.arithmetic import NEG
from compiler.ops.families.updates import MOMENTUM_UPDATE
from compiler.ops.language.program_ops import evaluate, program_of
from compiler.ops.primitives.shape import CAST, TRANSPOSE
from compiler.passes import precision
from compiler.pipeline.rewrites import check

RULE = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


class Joining(Target):
    """Joins so many updates."""

    def __init__(self, most):
        super().__init__("joining")
        self.most = most

    def max_merged_updates(self, num_full):
        return self.most


def trained(*, is_output=False, casts=1, is_turned=False):
    """Return the graph of one weight that is cast, and updated."""
    b = GraphBuilder()
    w, m, lr = [variable(b, name, s) for name, s in (("w", (3, 4)), ("m", (3, 4)), ("lr", ()))]
    low = [b.emit_one(CAST, w, dtype="bfloat16") for _ in range(casts)]
    grad = b.emit_one(NEG, b.emit_one(CAST, low[0], dtype="float32"))
    if is_turned:
        grad = b.emit_one(
            TRANSPOSE, b.emit_one(NEG, b.emit_one(TRANSPOSE, grad, perm=(1, 0))), perm=(1, 0)
        )
    b.outputs.append(Output("low", low[0] if is_output else b.emit_one(NEG, low[0])))
    for old, new in zip((w, m), b.emit(MOMENTUM_UPDATE, (w, grad, m, lr), RULE), strict=True):
        b.writes.append(Write(old, new))
    return update_programs(b.freeze())


def rounded(graph, most=10):
    made = precision.round_in_updates(graph, one_device(Joining(most)))
    check(made, "round_in_updates")
    return made


def names_of(graph):
    return [str(node.op) for node in graph.nodes]


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_cast_becomes_a_variable_that_the_update_writes(is_turned):
    graph = trained(is_turned=is_turned)
    made = rounded(graph)
    (cast,) = [
        n for n in graph.nodes if n.op is CAST and graph.types[n.outputs[0]].dtype.itemsize == 2
    ]
    (own,) = [n for n in made.nodes if n.outputs == cast.outputs]
    assert own.attrs["role"] == "rounded"
    assert own.attrs["init"] == (("kind", "rounded"), ("of", "w"))
    (node,) = [n for n in made.nodes if str(n.op) == "joined_updates"]
    assert node.inputs[2] == cast.outputs[0]
    assert [w for w in made.writes if w.variable == cast.outputs[0]] == [
        Write(cast.outputs[0], node.outputs[2])
    ]
    assert made.types[node.outputs[2]].dtype is DType.BFLOAT16


def test_the_program_makes_what_it_made_and_the_first_of_it_rounded():
    (node,) = [n for n in trained().nodes if n.op is MOMENTUM_UPDATE]
    alone = program_of(node.attrs)
    program = precision.with_rounded(alone)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=12).astype(np.float32) for _ in range(3)] + [np.float32(0.1)]
    old = evaluate(alone, Space(1, 12), tuple(arrays))
    *new, low = evaluate(program, Space(1, 12), (*arrays, np.full(12, np.nan, np.float32)))
    for one, other in zip(old, new, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(low, old[0], rtol=2.0**-8)
    assert not (low.reshape(-1).view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(("case", "most"), [({"is_output": True}, 10), ({"casts": 2}, 10), ({}, 1)])
def test_what_is_no_cast_of_one_reader_and_other_devices_stay_as_they_are(case, most):
    graph = trained(**case)
    assert names_of(rounded(graph, most)) == names_of(graph)


def read_only(*, casts=1, is_written=False, role="parameter"):
    """Return the graph of a weight that is cast, and nothing else reads."""
    b = GraphBuilder()
    w = variable(b, "w", (3, 4), role=role)
    for number in range(casts):
        low = b.emit_one(CAST, w, dtype="bfloat16")
        b.outputs.append(Output(f"y{number}", b.emit_one(NEG, low)))
    if is_written:
        b.writes.append(Write(w, b.emit_one(NEG, w)))
    return b.freeze()


def test_what_no_step_changes_is_rounded_where_its_values_are():
    graph = read_only()
    made = precision.round_constants(graph)
    check(made, "round_constants")
    w, low = made.nodes[0].outputs[0], graph.nodes[1].outputs[0]
    (own,) = [n for n in made.nodes if n.outputs == (low,)]
    assert own.attrs["init"] == (("kind", "rounded"), ("of", "w"))
    assert made.types[low].dtype is DType.BFLOAT16
    # It stays in the graph, for the rounded form is made of it, and nothing is written.
    assert made.writes == (Write(w, w),)
    assert [str(n.op) for n in prune(made).nodes].count("variable") == 2


@pytest.mark.parametrize("case", [{"casts": 2}, {"is_written": True}, {"role": "counter"}])
def test_what_a_step_changes_or_no_model_has_is_cast_in_each_step(case):
    graph = read_only(**case)
    assert names_of(precision.round_constants(graph)) == names_of(graph)
