"""Ops stated by a program: a signature as text and a function over expressions.

`fused_op` and `update_op` trace the function once for each form of call, and register what follows
from the program: types, reference, cost, how it fuses. `vjp` derives the program of the gradient.

    define       `fused_op`, `update_op`, `composite_update`
    expressions  arithmetic that emits instructions, rules of differentiation, signatures
    definition   what a definition says, and the columns that follow from it
    vjp          the gradient of a program as a program
    program_ops  ops with a program as attribute: fused, joined updates, region; in numpy

It may import `contract`, `graph` and `ops.primitives`. It must not import `families`, whose ops are
stated by it.

Begin reading at `define`, whose docstring shows an op of each kind.
"""
