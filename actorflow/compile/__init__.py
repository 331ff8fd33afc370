"""A plan for a graph: taken from the cache on disk, or compiled, proven and kept there.

A job asks for the plan of a `JobSpec`, which is found in the cache or compiled. The compiler learns
what each device and its kernels can do from its target, and ops, kernels and passes from outside
count as ours. Every plan, compiled here or read from a file, passes prove.py before it runs.

compiling.py       `JobSpec`, the plan cache and its key, `compiled_plan`; memory of the devices
hardware.py        the targets of a job's devices, each made when one of its kind is there
targets.py         the compiler's `Target` of the host and of simulated devices
cuda_target.py     that of a GPU
num_streams.py     how many compute streams pay
own_ops.py         `af.op` and `af.numpy_op`: ops made of a user's functions
extensions.py      `af.graph_pass` and `af.kernel`; plugins, installed packages that add such
prove.py           `prove`: all that is checked before a plan runs; the ports that a run binds
check_launches.py  each launch against its op's types, its kernel and its operands' bytes
plan_facts.py      what a plan says of its batches, outputs, snapshots and variables

May import actorflow.{environment, options, tensor}; actors.{kernels.common, kernels.cuda,
kernels.host, kernels.library, loop, race, simulation}; compiler.{contract, graph, ops.language,
ops.primitives, pipeline, verify}; memory. Must not import trace, which stands beside this room, nor
distributed, run, jobs or cli. compiler.pipeline.pipeline is imported late: a plan from the cache
needs none of it.

Begin reading at compiling.py: `cached_plan` and `compiled_plan` are the two ways to a plan.
"""
