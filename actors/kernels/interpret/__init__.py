"""The host's kernels in numpy: every op has one, and fused programs are followed here.

- `fused`, `steps`: a fused program, block by block; `chunked`: with products before and after it,
  chunk by chunk of rows.
- `blocks`: how a tensor is cut into pieces that stay in cache; `sums`: sums that lose little;
  `attention_blocks`: how attention is cut.
- `upcast`: kernels for bfloat16 made of those for float32; `bfloat16`: the conversions.
- the others, one file per family of ops.
"""
