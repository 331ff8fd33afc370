"""A plan opened on this machine and driven over data, from its first step to the last checkpoint.

A `Runner` opens a plan and proves it. Each of its calls makes one `Run`: the arena, the devices,
the actor loop, and a port for each end of the plan on the host. `fit` also restores the newest
checkpoint, reports and saves. A signal, a callback or a broken step ends a run by one `Stopper`: no
further step begins, and those under way are finished.

runner.py          `Runner`: `fit`, `stream`, `step`, and its variables between runs
training_run.py    `Run`: arena, loop and ports, from start to close; the trace of a run as a file
run_ports.py       the ports of a run, and who decides about each of them
fitting.py         one call of `fit`: what it opens, in order, and its `FitResult`
stepping.py        a run that is fed batch by batch, for `step`
open_plans.py      several plans stepped in turn, on one set of variables and one memory
switched_run.py    `fit` and `stream` over batches of several shapes: each step on its plan
evaluation.py      the ports of an evaluation between steps
ports.py           data and metrics ports; the positions of a source
checkpoint_port.py the port that writes checkpoints
devices.py         the devices of a plan opened; `verify_and_build`, whether a plan may run here
open_gpus.py       CUDA devices, real or emulated; imported for plans on GPUs alone
open_model.py      a model's values lent to a runner, for a run or for single steps
packed_values.py   values that an open plan alone has, in the form that its launches read
script_guard.py    notes on errors of a script that its own workers import again
live_variables.py  the variables of an open run, read and written between steps
probes.py          prints, checks, breakpoints, and the op of the first value that is not finite
broken_steps.py    steps whose loss or gradients are not finite: raise, warn or skip
stopping.py        `Stopper` and signals: how a run ends before its last step
saving.py          `RunContext`; what a checkpoint of a run holds, and when there is one; the start
                   of a run from the newest one
shown_errors.py    what is printed of an error: the user's frames and the message
report.py          what is reported of steps, and the metrics file
progress.py        how it is shown: a terminal's line, plain lines, a notebook's element
run_record.py      run.json: what a run was started with, for `actorflow runs` and `resume`
replay.py          past steps computed again, with the range of every value
replay_request.py  what `actorflow replay` asks of a script
callback_calls.py  the calls of a run's callbacks, one at a time
training_writes.py what callbacks of the training write, for the checkpoint of that step
status.py          status.json for `actorflow top`; `Listener`, which hears of every step

May import actorflow.{callbacks, checkpoint, compile, data, distributed, environment, nn, optim,
options, tensor, trace}; actors.{device, device.cuda, kernels.common, kernels.cuda, kernels.host,
kernels.library, loop, machine, testing, testing.emulated}; compiler.{contract, graph,
ops.primitives, pipeline, verify}; memory. Must not import jobs or cli: a runner needs no model
code.

Begin reading at training_run.py: a `Run` is what all ways to train come to. Then runner.py.
"""
