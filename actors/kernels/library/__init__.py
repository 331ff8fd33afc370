"""Native code that is built by the C compiler or loaded from a package.

`runtime` builds C texts and finds symbols. A `NativeLaunch` holds the address of one; neighbouring
launches run as one call. A matrix product goes as chunks to a `Library`: oneDNN, OpenBLAS, or the
small product in C. `tuning` measures which of them is fastest for a shape.

toolchain           a C compiler, and the folder of the libraries that it has built
runtime             the pool of threads, and the symbols of C texts
launch              one launch in C, and a chain of them as one call
gemm_launch         the launch of a product; the libraries OpenBLAS and the small product
gemm_onednn         products by oneDNN, also with a b that is packed once for a loop
convolution_onednn  primitives of oneDNN for convolutions, in blocked layouts
tuning              which library multiplies a shape: a table of measurements, or a fixed rule
onednn              oneDNN through its C interface; the owner of that package
resident            what the process has in memory and does not need, given back
onednn_calls        its declarations (onednn.h), parsed
openblas            the BLAS that numpy carries

It imports `actors.kernels.common`, `actors.machine` and `compiler.contract`, and no kernels: native
and host stand above it. openblas imports nothing of ours, since it also runs as a script.

Begin reading at runtime, which has the process's state; then launch.
"""
