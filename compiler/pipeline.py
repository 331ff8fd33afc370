"""Compile: the passes in the order in which they run, then lowering and proof.

    trace -> check -> fuse_attention -> fuse_loss -> autodiff -> simplify -> merge_loss
    -> remake_activations -> rates -> outputs -> order -> lower -> verify

One visible tuple, `PASSES`; a new pass is one new file and one line here. Between order and lower
stands `compiler.budget` where the options ask for fewer bytes: it rewrites an ordered graph, lowers
it, and looks whether the plan fits. With `options.verify` the
graph verifier runs after every pass; the plan verifier always runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass

import msgpack

import compiler.ops.standard  # noqa: F401  # registers what the passes read
from compiler.graph import Graph
from compiler.lower import lower
from compiler.options import CompileOptions
from compiler.passes import (
    autodiff,
    fuse_attention,
    fuse_loss,
    merge_loss,
    order,
    outputs,
    rates,
    remake_activations,
    simplify,
)
from compiler.passes.check import check
from compiler.plan import Plan
from compiler.target import Target
from compiler.verify import verify_plan


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite: its name, what must have happened before, what holds afterwards, and when."""

    name: str
    run: Callable[[Graph], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    is_wanted: Callable[[CompileOptions], bool] = lambda options: True


PASSES: tuple[Pass, ...] = (
    Pass("fuse_attention", fuse_attention.run, (), ("attention by the block",)),
    Pass("fuse_loss", fuse_loss.run, (), ("loss by the chunk",)),
    Pass("autodiff", autodiff.run, (), ("gradients",)),
    Pass("simplify", simplify.run, ("gradients",), ("minimal",)),
    Pass("merge_loss", merge_loss.run, ("minimal",), ("loss in one pass",)),
    Pass("remake_activations", remake_activations.run, ("minimal",), ("short activations",)),
    Pass("rates", rates.run, ("minimal",), ("rates",)),
    Pass("outputs", outputs.run, ("rates",), ("owned outputs",)),
    Pass("order", order.run, ("owned outputs",), ("order",)),
)

Watch = Callable[[str, Graph], None]
"""Called with the name of each pass and the graph it returned."""


def compile_graph(
    graph: Graph,
    target: Target,
    options: CompileOptions,
    watch: Watch | None = None,
    evaluation: Graph | None = None,
) -> Plan:
    """Return the verified plan of a traced graph, and of one that evaluates between its steps.

    Raises CompileError for what the user can mend, InternalError for a bug of ours.
    """
    fingerprint = hash_graph(graph)
    graph = _rewritten(graph, options, watch, "")
    if evaluation is not None:
        evaluation = _rewritten(evaluation, options, watch, "evaluation ")

    def lowered(ordered: Graph) -> Plan:
        return lower(ordered, target, options, fingerprint, evaluation)

    if not options.asks_for_less:
        plan = lowered(graph)
    else:
        from compiler.budget import meet_budget  # a third of the compiler: only where asked for

        graph, plan = meet_budget(graph, target, options, lowered)
        if watch is not None:
            watch("budget", graph)
    verify_plan(plan)
    return plan


def _rewritten(graph: Graph, options: CompileOptions, watch: Watch | None, prefix: str) -> Graph:
    """Run all passes over a graph."""
    if options.verify:
        check(graph, "trace")
    for step in [step for step in PASSES if step.is_wanted(options)]:
        graph = step.run(graph)
        if options.verify:
            check(graph, step.name)
        if watch is not None:
            watch(prefix + step.name, graph)
    return graph


def hash_graph(graph: Graph, *, with_sources: bool = False) -> str:
    """Return a hash of what the graph computes; `with_sources` adds scopes and user lines."""
    nodes = []
    for node in graph.nodes:
        row: list[object] = [node.op.name, node.inputs, node.outputs, tuple(node.attrs.items())]
        if with_sources:
            row += [node.scope, node.source.file, node.source.line]
        nodes.append(row)
    rules = [
        (u.op.name, u.variable, u.state, u.scalars, tuple(u.attrs.items())) for u in graph.updates
    ]
    body = [
        nodes,
        [(t.dtype.value, t.shape) for t in graph.types],
        [(o.name, o.value) for o in graph.outputs],
        graph.objective,
        rules,
        [(w.variable, w.value) for w in graph.writes],
        None if graph.accumulation is None else astuple(graph.accumulation),
        graph.num_ranks,
    ]
    return hashlib.blake2b(msgpack.packb(body, use_bin_type=True), digest_size=16).hexdigest()
