"""Which inputs an output takes over, when a value is read at more than one position."""

import pytest
from graphs import HostCosts

from compiler.graph.graph import Output
from compiler.graph.target import KernelInfo, one_device
from compiler.ops.families.arithmetic import ADD, EXP
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.shape import RESHAPE
from compiler.storage.buffers import assign_buffers, draft_launches
from compiler.storage.storage import assign_storage


class Offering(HostCosts):
    """Kernels that offer these pairs for `add` and `matmul`, and none for the rest."""

    fingerprint = "offering"

    def __init__(self, pairs):
        self.pairs = pairs

    def query(self, call):
        return KernelInfo(f"fake.{call.op}", 0, self.pairs if call.op in ("add", "matmul") else ())


def shares(sketch, op, view, pairs):
    """Whether op(u, u'), with u' another view of u's bytes or u itself, lies where u was."""
    b = sketch.b
    u = b.emit_one(EXP, sketch.input("x", (4, 4)))
    other = b.emit_one(RESHAPE, b.emit_one(RESHAPE, u, shape=(16,)), shape=(4, 4)) if view else u
    y = b.emit_one(op, u, other)
    b.outputs = [Output("y", y)]
    graph = b.freeze()
    storage = assign_storage(graph)
    drafts = draft_launches(graph, storage, one_device(Offering(pairs)))
    found = assign_buffers(graph, storage, drafts, ())
    assert storage.root[other] == u
    return found.of_root[u] == found.of_root[y]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("op", [ADD, MATMUL])
def test_a_value_read_twice_is_taken_over_only_where_both_positions_are_offered(sketch, op, view):
    assert shares(sketch, op, view, ((0, 0), (0, 1)))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("pairs", [((0, 0),), ((0, 1),), ()])
def test_a_value_that_a_kernel_reads_at_another_time_too_is_left_alone(sketch, pairs, view):
    assert not shares(sketch, MATMUL, view, pairs)


def chained(sketch):
    """Return three additions, one after the other, each of which may overwrite what it reads."""
    b = sketch.b
    x = sketch.input("x", (4, 4))
    values = [x]
    for _ in range(3):
        values.append(b.emit_one(ADD, values[-1], x))
    b.outputs = [Output("y", values[-1])]
    graph = b.freeze()
    storage = assign_storage(graph)
    return graph, storage, draft_launches(graph, storage, one_device(Offering(((0, 0),)))), values


def test_what_another_chain_leaves_here_is_taken_over_by_what_it_becomes(sketch):
    graph, storage, drafts, (x, first, second, third) = chained(sketch)
    found = assign_buffers(graph, storage, drafts[1:], (x, first), handed=(first,))
    assert found.of_root == {first: 0, second: 0, third: 0}
    plain = assign_buffers(graph, storage, drafts[1:], (x, first))
    assert plain.of_root == {second: 0, third: 0}
    assert plain.left_to == found.left_to == {}


def test_what_leaves_for_another_chain_gives_its_bytes_to_what_it_was_made_of(sketch):
    graph, storage, drafts, (x, first, second, third) = chained(sketch)
    found = assign_buffers(graph, storage, drafts, (x, third), leaving=(third,))
    assert found.of_root == {first: 0, second: 0}
    assert found.left_to == {0: third}


def test_bytes_that_were_handed_over_are_not_those_of_what_leaves(sketch):
    graph, storage, drafts, (x, first, second, third) = chained(sketch)
    found = assign_buffers(
        graph, storage, drafts[1:], (x, first, third), handed=(first,), leaving=(third,)
    )
    assert found.of_root == {first: 0, second: 0}
    assert found.left_to == {}
