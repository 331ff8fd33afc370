"""Kernels in C for the host, written by hand (*.c) or generated from a program.

A kernel's `bind` fills an argument block and returns a `NativeLaunch` on the address of a C
function. The compiler builds files and functions before a plan is loaded. Launches are cut for
threads by shapes alone, never by the number of threads.

fused            a program as one function, by itself or behind a product
emit             the C text of a program
loops            the C text of one phase of it
region           a region as one table of C calls, chunk by chunk
matmul           products, by the library that is fastest for the shape
convolution      convolutions by oneDNN; pooling
convolution_cut  the slices, runs and scratch of a convolution
attention        attention and its gradient
embedding        rows of a table, its gradient, and its update by rows
movement         copy, reshape, pad and concat
reduce           reductions over middle axes; sort and recurrences

runtime.c has the pool of threads and the runner of chains; the C files include runtime.h. af_math.h
and angles.h have functions of a float, sums.h sums in a fixed order, tiles.h and packing.h products
of small matrices. Each other *.c belongs to the file of native, library or host that names it.

It imports `actors.kernels.{common, library, program}`, `actors.machine` and `compiler.contract`. It
must not import reference or cuda.

Begin reading at fused: it goes from a program to text, scratch and launch; then emit.
"""
