"""Kernels in numpy: one for every op but loops and branches over bodies.

They need no C compiler and no library but numpy, and take the calls that no other kernel of the
host takes. Passes go over blocks that stay in cache, and `bind` prepares every view, so that a
launch is a sequence of numpy calls.

fused           a program, instruction by instruction; the random numbers of dropout
walk            blocks, registers and calls of numpy for the instructions of a program
region          the steps of a region, chunk by chunk
matmul          products through BLAS
convolution     convolution through BLAS; pooling
attention       attention, block by block
attention_grad  its gradient
embedding       rows of a table, its gradient, and its update by rows
reduce          reductions, sort and recurrences; sums that lose little
linear_algebra  LAPACK and pocketfft through numpy
bfloat16        casts of bfloat16, and kernels of 16-bit floats by way of float32

It imports `actors.kernels.{common, program}`, `actors.machine` and `compiler.contract`. It must not
import library, native or cuda. The ops that only move elements are in common/host_memory.

Begin reading at fused, for elementwise ops and reductions of rows run there; then walk.
"""
