"""What the rooms above ask of bytes and of order before anything has an address.

`storage` says which values share bytes. `order` sorts the nodes by that, and knows which run per
batch and which per step. `buffers` chooses a kernel for each launch of the ordered graph, and says
which outputs take over the bytes of an input.

    storage     roots and layouts of values; which reads must precede a write
    peer_edges  which ranks a launch has waited for; writes that have to wait for all
    order       the pass `order`; rates of nodes; batches under way in a pipeline
    buffers     launches with their kernels, live buffers, the time of each launch

It may import `contract`, `graph`, `ops.families`, `ops.primitives` and `memory`. It must not import
`lowering`: offsets and registers do not exist yet.

Begin reading at `storage`, since the others are written in its words.
"""
