"""What is known about each op, one file per family; `standard` imports and registers all.

In reading order:

- `signature`: the checks that `infer_type` functions share. `sources`: input, variable, constant.
- `rule`: how most cells are written.
- `elementwise`, `binary`, `reduce`, `shape`, `slicing`: the core; `core_gradients`: those
  of reductions and moves, apart as they are written in terms of the others.
- `convolution`, `pooling`: what models of images are made of besides.
- `activation`, `matmul`, `softmax`, `attention`, `norm`, `loss`, `embedding`, `random`: what models
  are made of.
- `fused`, `region`: many ops in one launch, with the interpreter as their meaning.
- `update`: the optimizers' writes; `non_finite`: whether a step has gone wrong; `square_sum`: how
  large gradients are. `comm`: between ranks; `copies`: between device and host memory.

A family file defines its op constants and fills the columns of `compiler.registry` for them.
"""
