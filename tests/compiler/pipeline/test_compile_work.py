"""Compiling takes work in proportion to the nodes: calls of functions are counted, not seconds."""

import sys

import pytest
from graphs import HostCosts, adam, variable

from compiler.contract.plan import Plan
from compiler.graph.graph import GraphBuilder
from compiler.graph.target import CompileOptions, one_device
from compiler.lowering import plan_builder
from compiler.lowering.lower import lower
from compiler.lowering.plan_builder import SEARCH_WORK, Item, pack
from compiler.ops.families.activation import TANH
from compiler.ops.families.arithmetic import ADD
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN
from compiler.ops.primitives.sources import INPUT
from compiler.passes import simplify
from compiler.pipeline.pipeline import PASSES
from compiler.pipeline.rewrites import PassContext
from compiler.storage.buffers import draft_launches
from compiler.storage.storage import assign_storage
from compiler.verify.verify import verify_plan

OPTIONS = CompileOptions("job")


def traced(depth):
    """A training job of `depth` layers with AdamW, in branches of four that meet in a sum."""
    b = GraphBuilder()
    x = value = b.emit_one(INPUT, name="x", dtype="float32", shape=(4, 4))
    weights = [variable(b, f"w{i}", (4, 4)) for i in range(depth)]
    for i, weight in enumerate(weights):
        start = x if i % 4 == 0 else value
        value = b.emit_one(ADD, b.emit_one(TANH, b.emit_one(MATMUL, start, weight)), value)
    loss = b.emit_one(MEAN, value, axes=(0, 1), keepdims=False)
    adam(b, loss, weights)
    return b.freeze()


def wanted_passes():
    return [step for step in PASSES if step.is_wanted(OPTIONS) and not step.per_choice]


def ordered(depth, target):
    graph = traced(depth)
    for step in wanted_passes():
        graph = step.run(graph, PassContext(target, OPTIONS))
    return graph


def calls(run):
    """Run, and return the result with the number of calls that it took, of C functions too."""
    count = 0

    def listen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(listen)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, count


def work(depth, target):
    """Return the calls of every part of a compilation."""
    counts = {}

    def counted(name, run):
        result, counts[name] = calls(run)
        return result

    graph = traced(depth)
    counted("hash", lambda: hash_graph(graph, with_sources=True))
    for step in wanted_passes():
        graph = counted(
            step.name, lambda step=step, graph=graph: step.run(graph, PassContext(target, OPTIONS))
        )
    plan = counted("lower", lambda: lower(graph, target, OPTIONS, ""))
    counted("verify", lambda: verify_plan(plan))
    data = counted("to bytes", plan.to_bytes)
    counted("from bytes", lambda: Plan.from_bytes(data))
    return counts


def test_every_part_of_a_compilation_calls_in_proportion_to_the_layers(fake_target):
    work(2, fake_target)  # what is worked out once per process
    few, more = work(30, fake_target), work(120, fake_target)
    for name, count in few.items():
        assert more[name] <= 4.4 * count + 400, f"{name}: {count} calls, {more[name]} of 4 x layers"


def test_the_target_is_asked_once_for_equal_calls(fake_target):
    class Counting(HostCosts):
        fingerprint = "counting"
        asked = 0

        def query(self, call):
            self.asked += 1
            return fake_target.targets[0].query(call)

    def asked(depth):
        target = Counting()
        graph = ordered(depth, fake_target)
        drafts = draft_launches(graph, assign_storage(graph), one_device(target))
        return target.asked, len(drafts)

    (few, few_drafts), (more, more_drafts) = asked(8), asked(40)
    assert few == more < few_drafts < more_drafts


def test_simplifying_what_is_simple_keeps_the_nodes_themselves():
    graph = traced(6)
    for step in wanted_passes():
        graph = step.run(graph, PassContext(one_device(HostCosts()), OPTIONS))
        if step.name == "simplify":
            break
    again = simplify.simplify_graph(graph)
    assert all([a is b for a, b in zip(again.nodes, graph.nodes, strict=True)])


@pytest.mark.parametrize("num_chains", [1, 7])
def test_the_searches_of_all_chains_share_one_allowance(monkeypatch, num_chains):
    allowed = []

    def recording(*columns, max_work, **options):
        allowed.append(max_work)
        return real(*columns, max_work=max_work, **options)

    real = plan_builder.plan_offsets
    monkeypatch.setattr(plan_builder, "plan_offsets", recording)
    items = [Item(64, 1, (c,), (i, i + 2)) for c in range(num_chains) for i in range(c + 2)]
    pack(items, [(c, c + 1) for c in range(num_chains)], 64)
    *inner, outer = allowed
    assert len(inner) == num_chains
    assert sum(inner) <= SEARCH_WORK == outer
    assert inner == sorted(inner)
