"""Kernels of CUDA devices: planned from a description of the GPU, described as calls at load.

- `gpu`: what is known of a GPU before there is one; one JSON file for each.
- `kernel`: a kernel of a CUDA device, with the two lives that every kernel has.
- `views`: windows on a device's memory, and scratch cut into them.
- `calls`: the closed set of things that a launch asks of a device; they are data, and no more.
- `device.cuh`: the words in which all kernel texts are written.
- `fused`, `programs`, `walks`: fused programs; how threads go through their rows; their calls.
- `emit`, `stages`, `loops`, `finish`: the text of a program: kernels, rows, phases, sums over rows.
- `nvrtc`: texts to machine code, kept by content.
- `strided_copy`, `movement`: elements from and to any layout, and the ops that only move them.
- `attention`: chunks of scores (`attention_chunks`), and what is done to them (`attention_rows`).
- `reduce`: sums, means and maxima over axes that no fused kernel reduces.
- `product`, `products`, `matmul`: matrix products as calls of the library.
- `region`, `program_steps`: wide values, chunk of rows after chunk; `epilogues`: what the library
  adds to a product before it stores it.
- `catalogue`: all kernels, by op and by name.

Nothing here needs a GPU, a driver or a package: what a launch is made of is known from shapes and
addresses, and who executes it stands in `actors.device`.
"""
