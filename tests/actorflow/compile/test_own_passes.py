"""Passes of a user by the decorator: with brackets and without, and what is no pass."""

import pytest
from error_texts import raises

import actorflow as af
from compiler.pipeline import rewrites


@pytest.fixture(autouse=True)
def without_passes():
    yield
    for added in rewrites.registered():
        rewrites.unregister(added.name)


def test_the_decorator_stands_with_brackets_and_without():
    @af.graph_pass
    def plain(graph):
        return graph

    @af.graph_pass(needs="rates", name="named", provides=["tea"])
    def other(graph):
        return graph

    steps = rewrites.registered()
    assert [(step.name, step.needs, step.provides) for step in steps] == [
        ("plain", (), ()),
        ("named", ("rates",), ("tea",)),
    ]
    assert steps[0].rewrite is plain
    assert steps[1].rewrite is other
    assert rewrites.registered_files() == (__file__,)


def test_names_of_passes_and_facts_are_texts():
    for options in ({"name": 5}, {"needs": 5}, {"after": 5}, {"provides": [5]}):
        with raises(ValueError):
            af.graph_pass(**options)(lambda graph: graph)


def test_a_pass_of_another_cell_takes_the_place_of_the_old_one():
    cell, identities = "@af.graph_pass\ndef mine(graph):\n    return graph\n", set()
    for number in range(2):
        exec(compile(cell, f"<cell {number}>", "exec"), {"af": af, "__name__": "__main__"})
        identities.add(rewrites.identity())
    assert [added.name for added in rewrites.registered()] == ["mine"]
    assert len(identities) == 2


@pytest.mark.parametrize("make", [lambda: af.graph_pass("simplify"), lambda: af.graph_pass()(5)])
def test_what_is_no_function_is_no_pass(make):
    with raises(ValueError):
        make()
