"""The logical graph, the registry of ops with its columns, and what a plan is made for.

A node applies an `Op` to values. An op is only a name: all that is known of it stands in typed
columns, which files of `ops` and `sbp` fill. A pass reads a graph and the columns, and makes
another graph by a `GraphBuilder`.

    graph            nodes, values, the graph, its builder and facts; pruning
    registry         ops, columns, most columns of the core, checks of operand types
    columns          columns of what an op does on parts of tensors; how cells are written
    program_builder  how a fused program grows; the columns by which an op becomes part of one
    target           what a device's kernels tell the compiler, and the compile options

It may import `contract` only. It names no op: ops know the graph, not the other way round.

Begin reading at `graph`, since every pass is a function from one graph to another.
"""
