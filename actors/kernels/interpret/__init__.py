"""The host's kernels in numpy: every op has one, and fused programs are followed here.

- `fused`, `steps`: a fused program, block by block; `fused_product`: with the product before it;
  `chunked`: with products before and after it, chunk by chunk of rows.
- `blocks`: how a tensor is cut into pieces that stay in cache; `recipe`: kernels as tables of
  steps; `rows`, `indices`: what several kernels share; `sums`: sums that lose little.
- `upcast`: kernels for bfloat16 made of those for float32; `bfloat16`: the conversions.
- the others, one file per family of ops.
"""
