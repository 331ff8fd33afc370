"""Eager mode: the function of a job, op by op, with values that can be looked at.

An `EagerTrace` computes each op as it is emitted, on the host or on a GPU. So functions, layers,
gradients and optimizers are those of jobs, and results are, bit by bit, those of a plan without
fusion.

blocks.py        memory of values, used again
launches.py      the launches of one op: planned by kind of call, bound by addresses
values.py        a value and the record of the op that made it
tape.py          gradients over records
eager_trace.py   the trace; what a thread keeps between traces
region.py        af.eager: a block, and a function called eagerly
training.py      a training step (Job.eager_step)

May import run.open_gpus, compile, trace, options, nn, functional, tensor, environment, data,
compiler, memory.report, actors.device, actors.kernels and actors.testing. Must not import
distributed or jobs.

Begin reading at eager_trace.py.
"""
