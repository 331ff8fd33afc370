"""Scans in graphs: what they compute, what their gradients ask for, and what nobody reads."""

import numpy as np
import pytest
from error_texts import raises
from graph_oracles import walked

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import GraphBuilder, Output
from compiler.ops.families.arithmetic import ADD, EXP, MUL
from compiler.ops.families.gradients import emit_gradients
from compiler.ops.families.loops import SCAN
from compiler.ops.primitives.body import Body, add_operand, body_of, finish_body, hash_graph
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.sources import INPUT
from compiler.passes import simplify

T, N = 4, 3
ROW = TensorType(DType.FLOAT64, (1, N))
WEIGHT = TensorType(DType.FLOAT64, (N, N))


def body_with(results):
    """Return a body (h, count, x, w, v) -> results of its values by name."""
    b = GraphBuilder()
    v = {name: add_operand(b, ROW) for name in ("h", "other", "x")}
    v |= {"w": add_operand(b, WEIGHT), "v": add_operand(b, WEIGHT)}
    v["new"] = b.emit_one(EXP, b.emit_one(ADD, b.emit_one(MATMUL, v["h"], v["w"]), v["x"]))
    v["wide"] = b.emit_one(MATMUL, v["other"], v["v"])
    return finish_body(b, [v[name] for name in results])


def graph_with(results, reverse=False, recompute=False):
    """Return a builder with a scan of that body, its operands, and what it makes."""
    b = GraphBuilder()
    types = (ROW, ROW, TensorType(ROW.dtype, (T, *ROW.shape)), WEIGHT, WEIGHT)
    given = [
        b.emit_one(INPUT, name=str(i), dtype=t.dtype.value, shape=t.shape)
        for i, t in enumerate(types)
    ]
    attrs = {
        "body": body_with(results), "length": T, "reverse": reverse, "carries": 2, "xs": 1,
        "recompute": recompute,
    }  # fmt: skip
    return b, given, b.emit(SCAN, given, attrs)


def run_graph(graph, arrays):
    """Return the outputs of a graph by name."""
    inputs = [node for node in graph.nodes if node.op is INPUT]
    known = {node.outputs[0]: arrays[node.attrs["name"]] for node in inputs}
    values = walked([node for node in graph.nodes if node.op is not INPUT], known)
    return {output.name: values[output.value] for output in graph.outputs}


def fed(graph):
    inputs = {n.attrs["name"]: graph.types[n.outputs[0]] for n in graph.nodes if n.op is INPUT}
    return {
        name: np.random.default_rng(int(name)).uniform(-0.3, 0.3, type_.shape)
        for name, type_ in inputs.items()
    }


def computed(b, values):
    b.outputs = [Output(str(i), v) for i, v in enumerate(values)]
    graph = b.freeze()
    return run_graph(graph, fed(graph)), graph


def scan_of(graph):
    return [node for node in graph.nodes if node.op is SCAN]


def test_a_body_is_equal_to_another_that_computes_the_same_on_other_lines():
    one, other = body_with(["new", "other"]), body_with(["new", "other"])
    assert one == other
    assert hash(one) == hash(other)
    assert one != body_with(["new", "wide"])


def test_the_body_is_part_of_the_hash_of_a_graph():
    digests = {hash_graph(graph_with(r)[0].freeze()) for r in (["new", "other"], ["new", "wide"])}
    assert len(digests) == 2


@pytest.mark.parametrize("change", [{"length": T + 1}, {"body": body_with(["w", "other"])}])
def test_types_that_do_not_fit_are_said(change):
    b, given, _ = graph_with(["new", "other"])
    attrs = Attrs({**b.nodes[-1].attrs, **change})
    with raises(CompileError):
        b.emit(SCAN, given, attrs)


def test_a_gradient_asks_for_what_it_reads_and_no_more():
    b, given, made = graph_with(["new", "other", "wide"])
    emit_gradients(b, {made[0]: made[0]}, [given[3]])
    forward, backward = scan_of(b.freeze())
    assert len(forward.outputs) == len(made) + 2, "h before each step, and exp's result"
    assert len(body_of(backward.attrs).operands) == len(backward.inputs)
    assert forward.outputs[: len(made)] == made


def test_with_recompute_a_scan_hands_out_its_carries_alone():
    b, given, made = graph_with(["new", "other"], recompute=True)
    emit_gradients(b, {made[0]: made[0]}, [given[3]])
    (forward, _) = scan_of(b.freeze())
    assert body_of(forward.attrs).results[2:] == body_of(forward.attrs).operands[:1]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_differences(reverse, recompute):
    b, given, made = graph_with(["new", "wide", "wide", "new"], reverse, recompute)
    wanted = [given[i] for i in (0, 2, 3, 4)]
    seeds = {v: v for v in (made[0], made[3])}
    found = emit_gradients(b, seeds, wanted)
    values, graph = computed(b, [made[0], made[3], *[found[v] for v in wanted if v in found]])
    arrays = fed(graph)

    def half_square(name, place, step):
        moved = {key: array.copy() for key, array in arrays.items()}
        moved[name][place] += step
        outputs = run_graph(graph, moved)
        return sum([(np.asarray(outputs[key]) ** 2).sum() / 2 for key in ("0", "1")])

    names = [str(given.index(v)) for v in wanted if v in found]
    for output, name in enumerate(names, 2):
        got = np.asarray(values[str(output)])
        for place in [(0,) * got.ndim, tuple([n - 1 for n in got.shape])]:
            slope = (half_square(name, place, 1e-6) - half_square(name, place, -1e-6)) / 2e-6
            assert got[place] == pytest.approx(slope, rel=1e-6, abs=1e-7), (name, place)


def test_what_nobody_reads_is_left_out():
    b, _, made = graph_with(["new", "wide", "wide", "new"])
    whole, _ = computed(b, [made[3]])
    narrow = simplify.narrow_bodies(b.freeze())
    (node,) = scan_of(narrow)
    assert (len(node.inputs), len(node.outputs)) == (3, 2), "h, x and w; h and the y"
    assert node.attrs["carries"] == node.attrs["xs"] == 1
    np.testing.assert_array_equal(run_graph(narrow, fed(narrow))["0"], whole["0"])


def test_of_ys_that_are_equal_one_is_made():
    b, _, made = graph_with(["new", "other", "wide", "wide", "new"])
    doubled = b.emit_one(ADD, b.emit_one(MUL, made[2], made[3]), made[4])
    b.outputs = [Output("0", doubled)]
    whole = run_graph(b.freeze(), fed(b.freeze()))
    narrow = simplify.narrow_bodies(b.freeze())
    (node,) = scan_of(narrow)
    assert len(node.outputs) - node.attrs["carries"] == 2
    np.testing.assert_array_equal(run_graph(narrow, fed(narrow))["0"], whole["0"])


def test_a_carry_stays_that_another_result_depends_on():
    b, _, made = graph_with(["new", "wide", "wide"])
    b.outputs = [Output("0", made[2])]
    (node,) = scan_of(simplify.narrow_bodies(b.freeze()))
    assert len(node.outputs) == 2
    assert isinstance(node.attrs["body"], Body)


def test_sums_of_other_things_run_in_the_loop():
    b, given, made = graph_with(["new", "other"])
    square = b.emit_one(MUL, made[0], made[0])
    found = emit_gradients(b, {square: square}, [given[3]])
    assert b.producer_of(found[given[3]]).op is MATMUL
