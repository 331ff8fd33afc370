"""Native code of the host: what is compiled once, kept on disk, and called without Python.

The floor:

toolchain   finds the C compiler, builds shared libraries, and keeps them by content
trust       whether a folder or a file of built libraries is the user's own
sealed      files of a cache that end with a hash of their name and content
runtime     the process's one pool of threads, the chain runner, and the symbols of built libraries
launch      a launch that C can make by itself: a function and its prebuilt argument block
chain       neighbouring launches as one call
prepare     all that a plan needs of the compiler, before it is loaded
kernels     all kernels in C, and the files that they call

Products:

gemm           a product as libraries take it, and its cut into chunks
onednn         oneDNN through its C interface; openblas: the BLAS that numpy carries
gemm_onednn    chunks as primitives of oneDNN; gemm_products: as calls of OpenBLAS, or of our own
gemm_launch    chunks as tables that C walks
tuning         which library is the fastest for a shape: measured once, or a fixed rule
matmul         the kernels, one per library
convolution    images in chunks, by oneDNN in its own layouts

Everything else, each beside its C file: attention, embedding, pooling, reduce and
movement (copy.c), with chunks, which says how a walk over tensors is cut.

runtime.c has the pool and the chain runner; runtime.h is what every other C file includes;
waiting.h has what a thread does while it waits, af_math.h the functions of one float, sums.h sums
in a fixed order, tiles.h and packing.h the products of small matrices.
"""
