"""Fusion: which nodes of a graph become one kernel.

Elementwise ops, broadcasts and reductions that feed one another become a cluster: one launch of a
straight-line program (`compiler.contract.program`). Products with the programs beside them become a
region, which works on chunks of rows (`compiler.contract.region`). Updates join no cluster: each
gets its program first, and many are joined last, once the byte budget is met. In the order of work:

    join_updates      an update as a program, and many updates as one launch
    prepare           reductions in stages, narrow broadcasts, dense operands
    recompute_cheap   cheap values of the forward pass, computed again where they are read
    members           how a node fits into a program, and how a cluster becomes one node
    fuse              the clusters, and why they form no cycle
    regions           wide values by the chunk, and products with the kernel that reads them

May import: compiler.contract, graph, ops, storage, and of sbp the schedule of collectives. Must not
import: passes, lowering, budget, pipeline. What a program computes is stated in ops.language; code
for a program is generated in actors.kernels.

Begin reading at `fuse`: its docstring defines a cluster, and every other file serves it.
"""
