"""Passes from elsewhere: where they stand, and what is refused of them."""

from dataclasses import replace

import pytest
from error_texts import raises

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.graph.graph import Output, UpdateRule
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import ABS, NEG
from compiler.pipeline import rewrites
from compiler.pipeline.pipeline import PASSES, compile_graph
from compiler.pipeline.printer import summarise

NAMES = [step.name for step in PASSES]


@pytest.fixture
def add():
    """Register passes that are gone after the test."""
    names = []

    def register(name="mine", run=lambda graph: graph, needs=(), provides=(), **place):
        rewrites.register(name, run, needs=needs, provides=provides, **place)
        names.append(name)

    yield register
    for name in dict.fromkeys(names):
        rewrites.unregister(name)


@pytest.fixture
def graph(sketch):
    x = sketch.input("x", (4, 3))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(NEG, sketch.b.emit_one(ABS, x)))]
    return sketch.b.freeze()


def compiled(graph, fake_target):
    return compile_graph(graph, fake_target, CompileOptions("job"))


def order_of(*names):
    placed = [step.name for step in rewrites.with_added(PASSES)]
    return [name for name in placed if name in names]


def test_without_passes_from_elsewhere_the_list_is_ours():
    assert rewrites.with_added(PASSES) is PASSES


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({}, ["mine", NAMES[0]]),
        ({"after": "simplify"}, ["autodiff", "simplify", "mine"]),
        ({"before": "order"}, ["fuse_products", "mine", "order"]),
        ({"needs": ("rates",)}, ["rates", "mine", "outputs"]),
        ({"needs": ("rates",), "before": "order"}, ["rates", "fuse_products", "mine", "order"]),
        ({"after": "order"}, ["order", "mine", "recompute"]),
    ],
)
def test_a_pass_stands_where_what_it_says_of_itself_puts_it(add, place, expected):
    add(**place)
    assert order_of(*expected) == expected


def test_added_passes_may_need_each_other_in_any_order_of_registration(add):
    add("late", needs=("mine is done",))
    add("early", provides=("mine is done",), after="simplify")
    assert order_of("simplify", "early", "late") == ["simplify", "early", "late"]


@pytest.mark.parametrize(
    "place",
    [
        {"needs": ("tea",)},
        {"after": "fusee"},
        {"before": "fusee"},
        {"after": "order", "before": "simplify"},
        {"provides": ("order",)},
        {"after": "spill"},
    ],
)
def test_a_pass_without_a_place_is_refused_by_name_and_file(add, place, graph, fake_target):
    add(**place)
    with raises(CompileError):
        compiled(graph, fake_target)


def unsorted(graph):
    return replace(graph, nodes=graph.nodes[::-1])


def mistyped(graph):
    return replace(graph, types=graph.types[::-1] + graph.types)


def trained(graph):
    value = graph.outputs[0].value
    return replace(graph, updates=(UpdateRule(NEG, value, (), (), Attrs({}), value),))


def renamed(graph):
    return replace(graph, outputs=(Output("z", graph.outputs[0].value),))


@pytest.mark.parametrize(
    "run", [lambda graph: None, lambda graph: 1 / 0, unsorted, trained, renamed]
)
def test_what_a_pass_returns_is_checked(add, run, graph, fake_target):
    add(run=run)
    with raises(CompileError):
        compiled(graph, fake_target)


def test_a_plan_says_which_passes_from_elsewhere_made_it(add, graph, fake_target):
    plain = compiled(graph, fake_target)

    def without_abs(graph):
        skipped = {n.outputs[0]: n.inputs[0] for n in graph.nodes if n.op is ABS}
        nodes = [replace(n, inputs=tuple(skipped.get(v, v) for v in n.inputs)) for n in graph.nodes]
        return replace(graph, nodes=tuple(nodes))

    add("without_abs", run=without_abs)
    plan = compiled(graph, fake_target)
    assert plan.option("passes") == ("without_abs",)
    assert "  passes from elsewhere: without_abs" in summarise(plan)
    assert plan.fingerprint != plain.fingerprint
    assert plain.option("passes") is None
    members = [dict(launch.attrs)["members"] for a in plan.actors for launch in a.launches]
    assert members == [("neg",)]


def test_a_name_is_taken_by_one_file(add):
    add("mine")
    add("mine", needs=("rates",))  # the same file, run again
    assert [added.needs for added in rewrites.registered()] == [("rates",)]
    with raises(ValueError):
        add("mine", where="other.py")


def test_files_and_places_are_part_of_what_a_plan_depends_on(add):
    assert rewrites.identity() == ""
    add("mine", after="simplify")
    here = rewrites.identity()
    assert rewrites.registered_files() == (__file__,)
    add("mine", after="rates")
    assert rewrites.identity() not in ("", here)
