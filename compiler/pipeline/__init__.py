"""The pipeline: the one list of rewrites, from a traced graph to a plan that is proven.

`compile_graph` runs the passes in the order of `PASSES`, lowers the graph, and verifies the plan.
Each rewrite states the facts that it needs and provides, and the order is checked against these.
Scripts and packages add passes of their own without an edit here.

    pipeline       PASSES, and the way of a graph through them; of several ranks, that of each
    rewrites       the kinds of passes, the check of their order, the graph verifier, added passes
    standard_ops   the list of files that register ops
    printer        graphs and plans as text

May import every room of the compiler, and memory. No room of the compiler imports this one: a pass
that needs the pipeline, such as the one that compiles bodies, is handed it as a function.

Begin reading at `pipeline.PASSES`: it names every rewrite, and why it stands where it does.
"""

from typing import Any

from compiler.contract.old_names import name_of_package


def __getattr__(name: str) -> Any:
    """Hand on what this package was called by until version 0.2, with a warning."""
    return name_of_package(__name__, name)
