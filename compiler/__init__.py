"""The compiler: from a logical graph to a physical plan. It knows no user API, device or thread.

`pipeline.compile_graph` takes a graph, what it is compiled for and options. It runs the passes over
the graph, lowers the ordered graph to a plan, and has `verify` prove the plan by other rules than
those that made it. Where a byte budget is set, `budget` repeats the last steps until it is met.

Rooms, in the order in which a reader needs them:

    contract   the plan and its words: all that actors know of the compiler
    graph      the logical graph, the registry of ops, what a device and a job ask for
    ops        the ops that ship: primitives, the language of programs, families
    storage    which values share bytes, and the order of nodes
    sbp        from the graph of all ranks to that of one
    passes     rewrites of the graph: gradients, precision, devices, layouts, batches
    fusion     which nodes become one kernel
    lowering   from an ordered graph to the tables of a plan
    budget     launches repeated and values on the host, until a plan fits its bytes
    verify     proofs about a plan, and about the plans of all ranks together
    pipeline   the one list of passes, and what runs it

Imports go down only; rooms between bars do not import each other:

    pipeline > budget | passes > lowering | fusion > sbp > storage | verify > ops > graph > contract

The compiler imports `memory`, and neither `actors` nor `actorflow`. `actors` imports of it
`compiler.contract` alone.

Begin reading at `contract/plan_tables.py`, which is what all of this makes, then `graph/graph.py`,
which is what it starts from, then `PASSES` in `pipeline/pipeline.py`, the way between the two.
"""

from compiler.contract import old_names

old_names.install()
