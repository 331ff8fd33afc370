"""Passes: rewrites of the logical graph, each a pure and deterministic function.

A file holds the rewrites of one noun; each rewrite has its own function, and a comment or docstring
above it that ends with what the rewrite guarantees. `compiler.pipeline.pipeline.PASSES` lists them
in the order in which they run, with the facts that each needs and provides. Some also take what the
devices (`Hardware`) or the job's options say. In the order in which a graph meets them:

    simplify        exact cleanup, attention by the block, scans without unread parts
    batches         buffers from batch to batch, two rates, owned outputs, copies at the ports
    autodiff        gradients, and all that stands between a gradient and its update
    assign_rows     rows that a buffer is assigned, written where it lies
    precision       16-bit floats where products read them
    value_ranges    the range of every value, for `debug=`
    place           a device for every node, and the copies between devices
    contiguous      parts along the first axis, for collectives of devices
    channels_last   layouts of images and of weights for convolutions

May import: compiler.contract, graph, ops, storage, of sbp the stages and collectives, of fusion the
updates as programs. Must not import: lowering, budget, pipeline. Passes of other rooms: sbp
(stages, distribute), fusion, storage (order), lowering (buckets, bodies), budget.

Begin reading at `autodiff`: `differentiate` turns a forward graph into a training step.
"""
