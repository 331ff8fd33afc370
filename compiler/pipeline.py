"""Compile: the passes in the order in which they run, then lowering and proof.

    trace -> check -> fuse_attention -> pack_attention -> fuse_loss -> autodiff -> simplify
    -> skip_updates -> merge_loss -> fuse_lookups -> sparse_update -> remake_activations
    -> precision -> rates -> outputs -> order -> lower -> verify

One visible tuple, `PASSES`; a new pass is one new file and one line here. The order is held against
what each pass says it needs (`check_order`), so that a swap is refused by name. Between order and
lower stands `compiler.budget.meet_budget` where the options ask for fewer bytes: it rewrites an
ordered graph, lowers it, and looks whether the plan fits. With `options.verify` the graph verifier
runs after every pass; the plan verifier always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import compiler.ops.standard  # noqa: F401  # registers what the passes read
from compiler.errors import InternalError
from compiler.fusion import fuse as fuse
from compiler.graph import Graph
from compiler.graph_hash import hash_graph
from compiler.lowering.lower import lower
from compiler.options import CompileOptions
from compiler.passes import (
    autodiff,
    fuse_attention,
    fuse_lookups,
    fuse_loss,
    merge_loss,
    order,
    outputs,
    pack_attention,
    precision,
    rates,
    remake_activations,
    simplify,
    skip_updates,
    sparse_update,
)
from compiler.passes.check import check
from compiler.plan import Plan
from compiler.target import Target
from compiler.verify import verify_plan


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite: its name, what must have happened before, what holds afterwards, and when.

    `needs` and `provides` are facts. A need is a fact that some pass provides: what is needed of a
    pass that the options leave out is waived, for whoever needs it does as well without.
    """

    name: str
    run: Callable[[Graph], Graph]
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    is_wanted: Callable[[CompileOptions], bool] = lambda options: True


PASSES: tuple[Pass, ...] = (
    Pass("fuse_attention", fuse_attention.run, (), ("attention by the block",)),
    Pass(
        "pack_attention",
        pack_attention.run,
        ("attention by the block",),
        ("heads where projections left them",),
    ),
    Pass("fuse_loss", fuse_loss.run, (), ("chunked loss",)),
    Pass(
        "autodiff",
        autodiff.run,
        ("heads where projections left them", "chunked loss"),  # gradients are of the new ops
        ("gradients",),
    ),
    Pass("simplify", simplify.run, ("gradients",), ("minimal",)),
    Pass(
        "skip_updates",
        skip_updates.run,
        ("minimal",),
        ("updates that a broken step skips",),
        is_wanted=lambda options: options.skips_broken_steps,
    ),
    Pass("merge_loss", merge_loss.run, ("minimal",), ("loss in one pass",)),
    Pass("fuse_lookups", fuse_lookups.run, ("minimal",), ("joined lookups",)),
    Pass(
        "sparse_update",
        sparse_update.run,
        ("minimal", "updates that a broken step skips"),  # a gradient that is searched is needed
        ("updates of rows",),
    ),
    Pass("remake_activations", remake_activations.run, ("minimal",), ("short activations",)),
    Pass(
        "precision",
        precision.run,
        ("loss in one pass", "short activations"),
        ("products in bfloat16",),
        lambda options: options.precision == "bf16",
    ),
    Pass("rates", rates.run, ("minimal", "updates that a broken step skips"), ("rates",)),
    Pass(
        "outputs",
        outputs.run,
        # From here on no value is replaced by another: bytes are given to what there is.
        ("rates", "joined lookups", "updates of rows", "short activations", "products in bfloat16"),
        ("owned outputs",),
    ),
    Pass(
        "fuse",
        partial(fuse.run, with_products=True, ends_at_saved=True),
        ("owned outputs",),
        ("groups",),
    ),
    Pass("order", order.run, ("owned outputs", "groups"), ("order",)),
)

LOWERING_NEEDS: tuple[str, ...] = tuple([fact for step in PASSES for fact in step.provides])
"""What lowering and the search for a budget take for granted: everything, the order last.

They insert copies and repeat nodes in an ordered graph (`compiler.budget.meet_budget`), and nothing
after them makes up for a rewrite that did not happen.
"""


def check_order(
    passes: Sequence[Pass], options: CompileOptions, wanted: Sequence[str] = LOWERING_NEEDS
) -> tuple[Pass, ...]:
    """Return the passes that the options want, in order; a few microseconds.

    Raises InternalError, naming pass and fact, where one needs what none before it provides, where
    two provide the same, and where a fact that is `wanted` in the end is provided by none.
    """
    provided: dict[str, str] = {}
    waived = {f for step in passes if not step.is_wanted(options) for f in step.provides}
    chosen = tuple([step for step in passes if step.is_wanted(options)])
    for step in chosen:
        for fact in step.needs:
            if fact not in provided and fact not in waived:
                later = [other.name for other in chosen if fact in other.provides]
                where = f"{later[0]!r} provides it later" if later else "no pass provides it"
                raise InternalError(f"pass {step.name!r} needs {fact!r}, and {where}")
        for fact in step.provides:
            if fact in provided:
                raise InternalError(
                    f"pass {step.name!r} provides {fact!r}, as {provided[fact]!r} does"
                )
            provided[fact] = step.name
    for fact in wanted:
        if fact not in provided and fact not in waived:
            raise InternalError(f"lowering needs {fact!r}, and no pass provides it")
    return chosen


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
        its = replace(options, precision=options.evaluate_precision)
        evaluation = _rewritten(evaluation, its, watch, "evaluation ")

    def lowered(ordered: Graph) -> Plan:
        return lower(ordered, target, options, fingerprint, evaluation)

    if not options.asks_for_less:
        plan = lowered(graph)
    else:
        from compiler.budget.meet_budget import (
            meet_budget,  # a third of the compiler: only where asked for
        )

        graph, plan = meet_budget(graph, target, options, lowered)
        if watch is not None:
            watch("budget", graph)
    verify_plan(plan)
    return plan


def _rewritten(graph: Graph, options: CompileOptions, watch: Watch | None, prefix: str) -> Graph:
    """Run all passes over a graph."""
    if options.verify:
        check(graph, "trace")
    for step in check_order(PASSES, options):
        graph = step.run(graph)
        if options.verify:
            check(graph, step.name)
        if watch is not None:
            watch(prefix + step.name, graph)
    return graph
