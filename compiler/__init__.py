"""The compiler: from a logical graph to a physical plan.

It knows no user API, no device and no thread. In processing order:

- `types`, `placement`, `errors`: the words everything else is written in.
- `graph`: the immutable logical graph and its builder, `attrs` of its nodes, `facts` that follow
  from it, `graph_hash` its hash; `registry`: typed columns of op knowledge; `options`: what a job
  asks of all this.
- `ops/`: one file per family of ops, each registering what it knows.
- `pipeline`: the one list of every rewrite, in order; `rewrites`: what each says of itself, and the
  check of their order; `added_passes`: those from elsewhere.
- `passes/`: one file per rewrite, `graph -> graph`, and `prune`, with which they drop nodes;
  `fusion/`: those that put ops into fused kernels.
- `rates`: what runs once per batch, and what once per step; `target`: what a device's kernels must
  tell the compiler; `bfloat16`: numbers of half the width, by their bits.
- `lowering/`: from an ordered graph to a plan.
- `budget/`: how a byte budget is met.
- `plan`: the physical plan, the one contract with the runtime; `rows` is how it is stored and read
  back by type, `printer` shows it, `accounting` says what its bytes are for.
- `references` asks whether a plan's tables fit together; `verify` proves it: `versions` that every
  read finds what it names (`places`: where versions lie), `shared_bytes` that who shares bytes is
  in order.
- `gc_pause`: no garbage collection while all this is made.
"""
