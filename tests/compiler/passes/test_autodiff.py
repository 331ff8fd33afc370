import numpy as np
from error_texts import raises
from graphs import descend

from compiler.contract.errors import CompileError
from compiler.graph.graph import Output, SourceLocation
from compiler.graph.registry import define, infer_type
from compiler.ops.families.arithmetic import ADD, EXP, MUL, SQUARE
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import ARGMAX, SUM
from compiler.ops.primitives.shape import STOP_GRADIENT
from compiler.passes import autodiff
from compiler.pipeline.rewrites import check


def with_sgd(s, loss, variables, lr=0.5):
    """Finish a sketch as a training graph whose update is variable - lr * gradient."""
    descend(s.b, loss, variables, lr)
    return s.b.freeze()


def gradients_of(graph, evaluate, feeds, names, lr=0.5):
    _, written = evaluate(autodiff.differentiate(graph), feeds)
    return {n: (feeds[n] - written[n]) / lr for n in names}


def numeric_gradient(graph, evaluate, feeds, name, eps=1e-6):
    result = np.zeros_like(feeds[name])
    for index in np.ndindex(result.shape):
        sides = []
        for sign in (1, -1):
            moved = dict(feeds)
            moved[name] = feeds[name].copy()
            moved[name][index] += sign * eps
            sides.append(evaluate(graph, moved)[0]["loss"])
        result[index] = (sides[0] - sides[1]) / (2 * eps)
    return result


def sum_all(s, value):
    axes = tuple(range(s.b.type_of(value).rank))
    return s.b.emit_one(SUM, value, axes=axes, keepdims=False)


def test_gradients_of_a_shared_and_branching_graph_match_finite_differences(sketch, evaluate):
    x = sketch.input("x", (3, 4))
    w = sketch.variable("w", (4, 2))
    c = sketch.variable("c", (2,))
    h = sketch.b.emit_one(ADD, sketch.b.emit_one(MATMUL, x, w), c)
    both = sketch.b.emit_one(MUL, h, sketch.b.emit_one(EXP, h))
    loss = sum_all(sketch, sketch.b.emit_one(ADD, both, sketch.b.emit_one(SQUARE, h)))
    graph = with_sgd(sketch, loss, [w, c])
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(3, 4)), "w": rng.normal(size=(4, 2)), "c": rng.normal(size=2)}
    got = gradients_of(graph, evaluate, feeds, ["w", "c"])
    for name in ("w", "c"):
        np.testing.assert_allclose(
            got[name], numeric_gradient(graph, evaluate, feeds, name), rtol=1e-6, atol=1e-7
        )


def test_a_value_used_twice_by_one_node_gets_both_contributions(sketch, evaluate):
    w = sketch.variable("w", (3,))
    loss = sum_all(sketch, sketch.b.emit_one(MUL, w, w))
    feeds = {"w": np.array([1.0, -2.0, 3.0])}
    got = gradients_of(with_sgd(sketch, loss, [w]), evaluate, feeds, ["w"])
    np.testing.assert_allclose(got["w"], 2 * feeds["w"])


def test_the_result_is_a_valid_graph_with_one_write_per_variable(sketch):
    w = sketch.variable("w", (3,))
    graph = autodiff.differentiate(with_sgd(sketch, sum_all(sketch, w), [w]))
    check(graph, "autodiff")
    assert graph.updates == ()
    assert graph.updates == ()
    assert [write.variable for write in graph.writes] == [w]


def test_gradient_nodes_carry_scope_and_line_of_their_forward_node(sketch):
    w = sketch.variable("w", (3,))
    with sketch.b.at("blocks.0", SourceLocation("train.py", 41)):
        y = sketch.b.emit_one(SQUARE, w)
    graph = autodiff.differentiate(with_sgd(sketch, sum_all(sketch, y), [w]))
    new = [n for n in graph.nodes if n.scope == "blocks.0"]
    assert len(new) > 1
    assert {str(n.source) for n in new} == {"train.py:41"}


def test_a_parameter_without_a_path_to_the_loss_is_named(sketch):
    w = sketch.variable("w", (3,))
    with sketch.b.at("", SourceLocation("model.py", 7)):
        lonely = sketch.variable("head.bias", (3,))
    graph = with_sgd(sketch, sum_all(sketch, w), [w, lonely])
    with raises(CompileError):
        autodiff.differentiate(graph)


def test_a_detached_path_gives_no_gradient(sketch):
    w = sketch.variable("w", (3,))
    loss = sum_all(sketch, sketch.b.emit_one(STOP_GRADIENT, w))
    with raises(CompileError):
        autodiff.differentiate(with_sgd(sketch, loss, [w]))


def test_integers_stop_the_flow_without_an_error(sketch, evaluate):
    w = sketch.variable("w", (3,))
    sketch.b.emit_one(ARGMAX, w, axis=0, keepdims=False)
    feeds = {"w": np.array([1.0, 2.0, 3.0])}
    got = gradients_of(with_sgd(sketch, sum_all(sketch, w), [w]), evaluate, feeds, ["w"])
    np.testing.assert_allclose(got["w"], np.ones(3))


def test_an_op_without_a_gradient_is_named_with_its_line(sketch):
    opaque = define("opaque_for_autodiff_test")
    infer_type.register(opaque, lambda inputs, attrs: inputs)
    w = sketch.variable("w", (3,))
    with sketch.b.at("", SourceLocation("user.py", 3)):
        y = sketch.b.emit_one(opaque, w)
    with raises(CompileError):
        autodiff.differentiate(with_sgd(sketch, sum_all(sketch, y), [w]))


def test_a_graph_without_an_objective_is_returned_as_it_is(sketch):
    x = sketch.input("x", (2,))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(EXP, x))]
    graph = sketch.b.freeze()
    assert autodiff.differentiate(graph) is graph
