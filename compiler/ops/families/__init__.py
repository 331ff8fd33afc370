"""The ops that are programs or compositions of ops, one file per family.

A new activation goes into `activation`, a new optimizer into `updates`: types, reference, gradient
(updates have none) and kernels follow from the op's program.

    activation     nonlinearities
    arithmetic     functions of each element, of one operand or two
    normalisation  layer, RMS and batch norm, softmax
    loss           cross entropies by rows
    weights        means by weight, and what weight a value has
    updates        counters, sums of batches, optimizers
    gradients      reverse-mode differentiation; gradients of primitives
    attention      scaled dot-product attention as one op
    embedding      rows picked by ids, and their updates
    along          sorting and recurrences along the last axis; flags and sums over tensors
    linear_algebra decompositions of matrices, Fourier transforms: what libraries compute
    loops          scan, while and cond over bodies

It may import `contract`, `graph`, `ops.language` and `ops.primitives`.

Begin reading at `activation`: each op there is one statement.
"""
