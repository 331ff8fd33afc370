"""The kernels that the launches of a plan run, for the host and for CUDA devices.

A kernel is a function that plans a call from shapes alone: whether it takes the call, how much
scratch it needs, how long it takes, and how it is bound to arrays or addresses at load, which gives
the launch: on a CUDA device, the calls of it. A catalogue lists the kernels of a device in the
order of preference.

common     what kernels of all targets share: `Kernel`, work and its cost, strides, products, caches
program    a fused program or a region as every generator sees it: phases, values, spaces
library    native code that is built or loaded: C runtime, oneDNN, OpenBLAS, choice between them
native     kernels in C, written by hand or generated from a program
reference  kernels in numpy, the reference and the last choice of the host
cuda       kernels of CUDA devices, planned and described without a GPU
host       the catalogue of the host, loops and branches over bodies, the rates of this machine

Imports go one way: host > native | reference, cuda > program | library > common. Rooms between two
arrows do not import each other. native uses library, but reference and cuda must not; host uses no
cuda. Below are only `actors.machine` and `compiler.contract`; no room imports a device or the loop.

Begin reading at common/kernel.py, because every other file makes what it defines.
"""
