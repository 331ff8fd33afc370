"""Ops stated by hand, which stand below the language of programs; bodies of loops.

A file defines its ops and fills their columns: types, reference in numpy, cost, views, gradient,
signatures of SBP. Kernels are not here but in `actors.kernels`.

    sources      inputs, variables, constants; random bits and dropout
    shape        reshape, transpose, broadcast, copy, cast
    slicing      slice, pad, concat
    reduce       sum, mean, max, argmax; `sum_to`
    matmul       matrix products
    convolution  convolutions and max pooling
    transfer     collectives, sends between stages, copies between memories, `to_sbp`
    body         graphs inside a node; the hash of a graph

It may import `contract` and `graph`. It must not import `language` or `families`: a gradient that
needs arithmetic is in `families/gradients.py`.

Begin reading at `sources`: input, variable and constant are the smallest ops, without operands.
"""
