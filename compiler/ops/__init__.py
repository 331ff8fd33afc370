"""The ops that ship with the compiler, on three floors: families > language > primitives.

    primitives  ops stated by hand: sources, shapes, reductions, products, transfers; bodies
    language    how an op is stated by a program, and what follows from the program
    families    the ops that are programs or compositions, one file per family

A cell of a column is registered in the file that knows it; `compiler.pipeline.standard_ops` imports
every file that defines ops. The rooms may import `contract` and `graph`, and no room above `ops`.

Begin reading at `families/activation.py`, where most ops are one statement.
"""
