"""Kernels of CUDA devices: planned from the description of a GPU, described as calls at load.

Nothing here needs a GPU or a driver: a kernel plans with a `Gpu`, a file of numbers, and its plan
returns the calls of a launch on given addresses. `actors.device.cuda` executes them.

calls             the closed set of calls of a launch, as data; records for cuBLASLt and cuDNN
kernel            what binds a launch, the description of a GPU, views of its memory
fused             fused programs; the updates of many variables by one kernel
programs          walk, grid, scratch and calls of a program
emit              the text of a program: its kernels, rows, and sums over rows
loops             the text of one phase of it
region            the steps of a region, chunk by chunk
epilogues         what cuBLASLt does to a product before it stores it, found in a program
matmul            products by cuBLASLt
cudnn_attention   attention by cuDNN
attention         attention and its gradient in chunks of scores
attention_rows    the kernels between its products
cudnn_convolution convolution by cuDNN
convolution       convolution as copies and products; pooling
embedding         rows of a table, its gradient, and its update by rows; the sort of keys
reduce            reductions; sort and recurrences along an axis
movement          copy, reshape, pad and concat; copies between strided tensors
control           loops and choices over bodies
nvrtc             texts to machine code, kept by content; where NVIDIA's libraries lie
catalogue         all kernels, by op and by name

It imports `actors.kernels.{common, program}`, `actors.machine` and `compiler.contract`. It must not
import the kernels of the host or a device. device.cuh has the words of all kernel texts.

Begin reading at calls, because everything here ends as those; then fused.
"""
