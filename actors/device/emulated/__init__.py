"""A CUDA driver on the host: late as a seed likes, strict as CUDA is, without a GPU.

Kernel texts are built by the C compiler behind a header that runs the threads of a block as fibers;
products are computed by numpy from what their descriptors say.
"""
