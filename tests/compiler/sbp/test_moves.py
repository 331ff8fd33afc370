"""Every way between layouts: the right tensor, and no more bytes than a ring sends."""

import itertools

import numpy as np
import pytest
from rank_graphs import parts_of, run_ranks, whole_of

from compiler.contract.placement import AxisLinks, Mesh, MeshLink
from compiler.contract.sbp import BROADCAST, PARTIAL, PARTIAL_MAX, Split, format_sbp
from compiler.contract.types import DType, TensorType
from compiler.graph.columns import SbpSignature
from compiler.graph.graph import GraphBuilder, Output
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import INPUT
from compiler.sbp.boxing import cheapest_boxing
from compiler.sbp.derive import CandidateSignature
from compiler.sbp.distribute import SbpAssignment, distribute
from compiler.sbp.infer import SbpChoice

S0, S1, S2, B, P = Split(0), Split(1), Split(2), BROADCAST, PARTIAL
WORDS = (S0, S1, S2, B, P)
SHAPES = ((4, 8, 12), (5, 7, 6))
RNG = np.random.default_rng(3)


def layouts_of(mesh, source, target):
    """Return a graph that reads a tensor as `target` which lies as `source`, and its layouts."""
    wires = (AxisLinks.alike(MeshLink()),) * len(mesh.shape)
    choices = [
        SbpChoice(
            (before, after),
            (
                CandidateSignature(SbpSignature((), (before,))),
                CandidateSignature(SbpSignature((after,), (after,))),
            ),
            0.0,
        )
        for before, after in zip(source, target, strict=True)
    ]
    return SbpAssignment(mesh, wires, tuple(choices))


def moved(array, mesh, source, target):
    """Return what each rank has of an array once it is brought into another layout."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype=array.dtype.name, shape=array.shape)
    b.outputs = [Output("y", b.emit_one(COPY, x))]
    layouts = layouts_of(mesh, source, target)
    graphs = [distribute(b.freeze(), layouts, rank) for rank in range(mesh.num_ranks)]
    held = {(): array}
    for axis, word in enumerate(source):
        held = {
            (*at, index): part
            for at, whole in held.items()
            # What is the same on several ranks has the same shares.
            for index, part in enumerate(
                parts_of(whole, word, mesh.shape[axis], np.random.default_rng(whole.size))
            )
        }
    feeds = [{g.nodes[0].outputs[0]: held[mesh.coordinates(r)]} for r, g in enumerate(graphs)]
    values = run_ranks(graphs, feeds, mesh)
    copies = [next(n for n in g.nodes if n.op is COPY).inputs[0] for g in graphs]
    return [own[value] for own, value in zip(values, copies, strict=True)]


def joined(parts, mesh, words):
    """Return the whole of what all ranks have."""
    at = {mesh.coordinates(rank): part for rank, part in enumerate(parts)}
    for axis in reversed(range(len(words))):
        keys = dict.fromkeys([key[:axis] for key in at])
        at = {
            key: whole_of([at[*key, i] for i in range(mesh.shape[axis])], words[axis])
            for key in keys
        }
    return at[()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_tensor_gets_from_any_layout_to_any_other(shape, parts):
    array, mesh = RNG.standard_normal(shape), Mesh(("ranks",), (parts,))
    for source, target in itertools.permutations(WORDS, 2):
        made = moved(array, mesh, (source,), (target,))
        np.testing.assert_allclose(
            joined(made, mesh, (target,)), array, atol=1e-12, err_msg=f"{source} -> {target}"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_gets_between_all_layouts_over_two_axes(shape):
    array, mesh = RNG.standard_normal(shape), Mesh(("outer", "inner"), (2, 2))
    pairs = list(itertools.product(WORDS, repeat=2))
    for source, target in itertools.permutations(pairs, 2):
        made = moved(array, mesh, source, target)
        text = f"{format_sbp(source)} -> {format_sbp(target)}"
        np.testing.assert_allclose(joined(made, mesh, target), array, atol=1e-12, err_msg=text)


def test_a_largest_share_becomes_the_maximum_or_a_part_of_it():
    array, mesh = RNG.standard_normal((6, 4)), Mesh(("ranks",), (3,))
    for target in (B, S0, S1, P):
        made = moved(array, mesh, (PARTIAL_MAX,), (target,))
        np.testing.assert_allclose(joined(made, mesh, (target,)), array, atol=1e-12)


def sent_bytes(type_, source, target, mesh):
    """Return the bytes of the cheapest way, over links whose time is all that counts."""
    wires = (AxisLinks.alike(MeshLink(1e-9, 0.0)),) * len(mesh)
    return cheapest_boxing(type_, source, target, mesh, wires)[0] * 1e-9


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_rank_sends_what_it_sends_in_a_ring(parts):
    type_ = TensorType(DType.FLOAT32, (24, 48, 8))
    share = type_.size_bytes * (parts - 1) / parts
    ring = {
        (P, B): 2 * share, (P, S0): share, (P, S2): share, (S0, B): share, (S1, B): share,
        (S0, S1): share / parts, (B, S0): 0, (B, P): 0, (S1, P): 0,
    }  # fmt: skip
    for (source, target), wanted in ring.items():
        sent = sent_bytes(type_, (source,), (target,), (parts,))
        assert sent == pytest.approx(wanted, abs=1e-3)


def test_what_two_axes_split_alike_is_gathered_before_the_outer_one_moves():
    type_ = TensorType(DType.FLOAT32, (8, 8))
    _, way = cheapest_boxing(type_, (B, S0), (S0, S0), (2, 2), (AxisLinks.alike(MeshLink()),) * 2)
    assert way == ((B, B), (S0, B), (S0, S0))


def test_sums_over_two_axes_are_scattered_first():
    type_ = TensorType(DType.FLOAT32, (1 << 20, 8))
    whole = 2 * 2 * type_.size_bytes * 3 / 4
    assert sent_bytes(type_, (P, P), (B, B), (4, 4)) < 0.7 * whole
