"""Passes of a user by the decorator: with brackets and without, and what is no pass."""

import pytest

import actorflow as af
from compiler import added_passes


@pytest.fixture(autouse=True)
def without_passes():
    yield
    for added in added_passes.registered():
        added_passes.unregister(added.step.name)


def test_the_decorator_stands_with_brackets_and_without():
    @af.graph_pass
    def plain(graph):
        return graph

    @af.graph_pass(needs="rates", name="named", provides=["tea"])
    def other(graph):
        return graph

    steps = [added.step for added in added_passes.registered()]
    assert [(step.name, step.needs, step.provides) for step in steps] == [
        ("plain", (), ()),
        ("named", ("rates",), ("tea",)),
    ]
    assert steps[0].run is plain
    assert steps[1].run is other
    assert added_passes.registered_files() == (__file__,)


@pytest.mark.parametrize("make", [lambda: af.graph_pass("simplify"), lambda: af.graph_pass()(5)])
def test_what_is_no_function_is_no_pass(make):
    with pytest.raises(ValueError, match="a pass is a function from a graph to a graph, got"):
        make()
