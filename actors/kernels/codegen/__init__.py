"""Code from fused programs (compiler.fusion.program): what a whole one computes as one function.

phases       which loops over a row a program needs, and which values live between them
expressions  one instruction as an expression of C
values       what values are called in the text, and where their elements are
loops        one phase as a loop over the columns of one row, or of several at once
stages       what is done once per launch, row and column, for every target
emit         the C text of a program: one function for every shape
arguments    which word of a function's argument block says what
spaces       where the operands of a launch lie in its space
chunks       how a space is cut into pieces for threads, from its extents alone
programs     the program of a launch and what follows from it, worked out once
fused_kernel the kernel "c.fused" that plans, binds and runs such a function
fused_product a product and the program that reads it as one launch
embedding_update  the function of an update, on the rows of a table that a batch picked
region_arrays  the arrays of a region while a chunk is worked on
chunked      a region as one table of calls, chunk by chunk of rows
"""
