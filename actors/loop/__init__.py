"""A plan that runs: its memory, its threads, and who looks at them.

`load` allocates the arenas of a plan and binds its launches; the result is a `BoundPlan`. A `Loop`
is one run of it. The dispatcher's thread owns the machine, runs inline chains, and hands the others
to a worker per stream; workers answer with messages. Whatever comes from outside (more steps,
a visit to the variables, `close`) goes through the dispatcher's inbox.

- `load`       from a plan to bound launches, one set for each slot phase.
- `bound`      a bound plan: blocks, views, variables, and the tokens that ports see.
- `loop`       one run, as the rest of the program sees it.
- `dispatch`   the thread that owns the machine; `LoopOptions`.
- `inbox`      what other threads send to that one.
- `worker`     the threads of streams, what each runs now, and what was handed to them.
- `failure`    a launch that failed, in words, and how a run ends.
- `admission`  steps that may begin, ports until they are closed, visits between two messages.
- `watchdog`   who holds up a run that stands still.
- `timeline`   what happened when, as a Chrome trace.
- `trace_counters`  its counters: ready slots of registers, live bytes of arenas.

It may import `actors.device`, `actors.machine` and `compiler.contract`. No kernel and no CUDA
device is imported here: they come in through the protocols of `actors.machine.protocol`.

Begin reading at `loop`, because its methods are all that a caller has; then `dispatch`.
"""
