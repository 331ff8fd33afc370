"""Fused programs: elementwise, broadcast and reduction ops as one straight-line program.

- `program`: what a fused program is; `builder` grows one, `check` holds it to its rules.
- `spaces`: where the elements of an operand lie; `expansion`: how an op becomes instructions.
- `expressions`, `notation`, `forms`, `define`: an op stated by its program; `columns`: what
  follows from it; `derivatives`, `derive`, `products`: the op that is its gradient.
- `interpreter`: what a program means, instruction by instruction, in numpy.
- `updates`: an update of variables stated by its program; `update_programs` puts it into the node.
- `stage_reductions`, `narrow_broadcasts`, `recompute_cheap`, `dense_operands`: what makes a graph
  ready; `members`: which nodes fit; `waiting`: which may run where they are read; `fuse` finds what
  becomes one kernel, `emit` puts it into the graph; `fuse_products` adds the matrix product that
  one alone reads.
- `region`: products and programs over chunks of rows; `region_steps`: one made of a graph's nodes;
  `chunk_wide` finds the values that are to exist by the chunk.
"""
