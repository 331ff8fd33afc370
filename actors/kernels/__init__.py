"""The host's kernels: one numpy kernel for every op that launches.

- `kernel`: what a kernel is (query at compile time, bind at load); `catalogue`: all of them, by
  op and name.
- `blocks`, `scratch`: how a tensor is cut into pieces that stay in cache, and how planned scratch
  is carved.
- `recipe`: elementwise kernels written as tables of steps; `elementwise`: the tables.
- `reduce`, `shape`, `matmul`, `softmax`, `norm`, `loss`, `embedding`, `random`, `update`: the
  other families.
- `attention`, `attention_grad`, with `attention_blocks`: products and softmax without a matrix of
  scores.
- `sums`: sums of many floats that lose little; `non_finite`: whether there is NaN or infinity.
- `rows`, `indices`, `attributes`: what several families share.
- `work`: what a launch does in quantities that no machine changes; `cost`: its time at some rates;
  `calibration`: the rates of this machine, kept in a `measured_file`; `recost`: every launch of a
  plan at them.
- `floating_point`: what a thread must set once before it runs launches.
"""
