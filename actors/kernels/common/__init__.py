"""What kernels of all targets share.

A kernel answers with `KernelNeeds`: scratch from its `Piece`s, and a duration, which `cost` makes
of its `Work`. The files of single ops serve several targets, so that they bring a product, a
convolution or a copy into one form.

kernel             the protocol of a kernel; scratch, work, operands, attributes, row indices
cost               the time of a launch: work at the rates of a machine
strides            walks over strided operands, and blocks that stay in cache
host_memory        aligned blocks and views of the host; ops that only move elements
gemm               the form of a matrix product, and its chunks
convolution_steps  convolution and its gradients as fills, copies and products; pooling windows
attention_blocks   how attention is cut into blocks of scores
files              cache files: trust, seals, JSON objects

It imports `actors.machine` and `compiler.contract`, and no other room of kernels.

Begin reading at kernel, for the other files use its types; then strides and gemm.
"""
