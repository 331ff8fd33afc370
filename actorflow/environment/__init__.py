"""What the process is told and what the machine has: settings, options, cores, GPUs, kernels.

A command or a job reads the environment variables once, into a frozen `Settings`, and passes it
down. What follows from it and from the machine is decided here: the number of threads, the GPU that
a plan is made for, and whether native kernels are on. Ranks, runs and `actorflow doctor` ask for
the same answers, so this room stands below all of them.

settings.py         the table of ACTORFLOW_* variables, `Settings`, the logger, `collector_paused`
option_values.py    values that users write: checked fields, patterns over paths, sizes in bytes
host.py             what `actorflow doctor` sees of the machine; the GPU and the threads of a plan
kernel_times.py     a convolution and a product by numpy's kernels and by native ones
native.py           native kernels turned on and off, and what the C compiler refuses

May import compiler.contract and, of actors, machine, device.cuda and kernels.{common, cuda, host,
library}. Must not import another room of actorflow: all of them may import this one.

Begin reading at settings.py: the other files take a `Settings`.
"""
