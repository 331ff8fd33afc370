"""What kernels of all targets share.

Call and binding, work and cost, strides, products, cuts, files of caches.
"""
