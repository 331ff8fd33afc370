"""A fused program or a region as a generator sees it, for no target.

`schedule` orders the loops of a program and `cut` its pieces for threads. `space_of` says how its
operands lie in the space that a launch walks. `Values` names the values in the text of C or CUDA,
and `stage_functions` is the text around the loops, with a `Dialect` for what the two differ in.

phases   the loops over a row, the values that live between them, and the pieces for threads
spaces   the operands of a program, and the arrays of a region, in the space that is walked
numbers  which numbers of a program are words and not text, so that sizes share a text
stages   blocks of text, and the functions of a program per launch, row and column
values   words of the argument block, expressions, and the names and places of values

It imports `actors.kernels.common`, `actors.machine` and `compiler.contract`. It must not import a
target (native, reference, cuda): their generators and interpreters begin here.

Begin reading at phases, because the schedule decides what spaces and values have to hold.
"""
