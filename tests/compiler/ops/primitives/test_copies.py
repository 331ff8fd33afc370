"""Where values lie: in the place of a copy, of a source that says so, else with their node."""

from dataclasses import replace

import pytest
from error_texts import raises
from graphs import Target, variable

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.placement import HOST_SIDE
from compiler.graph.graph import GraphBuilder
from compiler.lowering.step_program import make_program
from compiler.ops.families.arithmetic import EXP
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import COPY_TO, is_copy, value_device, value_devices
from compiler.storage.storage import assign_storage

TARGET = Target("fake", ("exp", "copy"), lambda call: 1.0, lambda call: 0, None)


def moved():
    """An input on the host's side comes to device 0, is looked at, and its exp goes to device 1."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(2, 3), place=HOST_SIDE)
    here = b.emit_one(COPY_TO, x, to=0, bucket=0)
    turned = b.emit_one(TRANSPOSE, here, perm=(1, 0))
    made = b.emit_one(EXP, turned)
    there = b.emit_one(COPY_TO, made, to=1, bucket=1)
    return b, (x, here, turned, made, there)


def test_a_value_lies_where_its_node_computes_unless_a_copy_or_a_source_says_otherwise():
    b, values = moved()
    b.nodes[-1] = replace(b.nodes[-1], device=5)  # what runs a copy says nothing of its place
    graph = b.freeze()
    assert [value_device(graph, v) for v in values] == [HOST_SIDE, 0, 0, 0, 1]
    assert [is_copy(node) for node in graph.nodes] == [False, True, False, False, True]
    on_device_2 = replace(graph, nodes=tuple([replace(n, device=2) for n in graph.nodes]))
    assert value_devices(on_device_2) == (HOST_SIDE, 0, 0, 2, 1)


def test_a_copy_with_a_second_input_writes_over_it_and_one_without_writes_over_nothing():
    b, (_, here, *_) = moved()
    over = b.emit_one(COPY_TO, here, variable(b, "v", (2, 3)), to=0, bucket=2)
    graph = b.freeze()
    assert [n.writes for n in graph.nodes if is_copy(n)] == [(), (), ((0, 1),)]
    root = assign_storage(graph).root
    assert root[over] == graph.nodes[-1].inputs[1]
    assert root[here] == here


@pytest.mark.parametrize(("device", "to"), [(1, 1), (0, 0)])
def test_a_launch_of_another_device_and_a_copy_that_goes_nowhere_are_bugs(device, to):
    b, _ = moved()
    nodes = [replace(n, device=device) if n.op is EXP else n for n in b.freeze().nodes]
    nodes[-1] = replace(nodes[-1], attrs=Attrs({"to": to, "bucket": 1}))
    with raises(InternalError):
        make_program(replace(b.freeze(), nodes=tuple(nodes)), TARGET, 1, 0)


def test_what_reads_host_memory_and_is_no_copy_is_a_bug():
    b, (x, *_) = moved()
    b.emit_one(EXP, x)
    with raises(InternalError):
        make_program(b.freeze(), TARGET, 1, 0)
