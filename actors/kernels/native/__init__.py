"""Native code of the host: what is compiled once, kept on disk, and called without Python.

toolchain  finds the C compiler, builds shared libraries, and keeps them by content
runtime    the process's one pool of threads, the chain runner, and the symbols of built libraries
launch     a launch that C can make by itself: a function and its prebuilt argument block
runtime.c  the pool and the chain runner; runtime.h is what every other C file includes
"""
