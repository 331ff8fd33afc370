"""The compiler: from a logical graph to a physical plan.

It knows no user API, no device and no thread. In processing order:

- `types`, `placement`, `errors`: the words everything else is written in.
- `graph`: the immutable logical graph and its builder, `attrs` of its nodes, `graph_hash` its hash;
  `registry`: typed columns of op knowledge; `options`: what a job asks of all this.
- `group`: elementwise, broadcast and row-reduction ops as one program; `group_builder` grows it,
  `group_check` holds it to its rules, `group_space` says where operands lie, `group_members` which
  nodes fit, `expansion` has the columns that say how.
- `bfloat16`: numbers of half the width, by their bits.
- `ops/`: one file per family of ops, each registering what it knows.
- `passes/`: one file per rewrite, `graph -> graph`; `pipeline` lists them in order.
- `target`: what a device's kernels must tell the compiler; `launch_times`: when each would run.
- `budget`: how a byte budget is met, by `fit` (launches run again) or `choose_offload` (bytes on
  the host).
- `lower`: graph to actors and launches. `storage`, `buffers`: which values share bytes; `rates`:
  what runs once per batch; `chains`, `chain_actors`, `actor_graph`: who runs which launches;
  `value_versions`: what each reads and writes; `snapshots` of the variables; `plan_builder`: the
  tables while they grow. `packing`: where all registers lie; `accounting`: what for.
- `plan`: the physical plan, the one contract with the runtime; `rows` is how it is stored and read
  back by type, `printer` shows it.
- `references` asks whether a plan's tables fit together; `verify` proves it: `versions` that every
  read finds what it names (`places`: where versions lie, `version_makers`: who makes them,
  `carried`: what goes from firing to firing), `shared_bytes` that who shares bytes is in order.
- `collector`: no garbage collection while all this is made.
"""
