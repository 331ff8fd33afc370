"""The runtime: runs a physical plan, and nothing else.

A plan is a static graph of actors. An actor fires when its inputs hold enough tokens and its
outputs enough free slots. One pure machine decides that; loop, simulator and tests all run it.

- `machine`      the machine: messages in, firings out; the protocols of what the runtime drives.
- `race`         which firing happens before which, and accesses to bytes that nothing orders.
- `kernels`      what the launches of a plan run, for the host and for CUDA devices.
- `device`       firings on streams: the executor, the host as a device, CUDA devices.
- `collectives`  tensors between the ranks of one host, through shared memory.
- `simulation`   the machine on virtual time: how long a plan takes, on one rank or many.
- `loop`         a plan that really runs: memory, threads, admission, watchdog, timeline.
- `testing`      the machine in random and in all orders, mutants, devices that the host acts.

An import goes down this list of layers, and never sideways or up (`|` stands between rooms that do
not know each other):

    loop | testing > device | collectives | simulation > kernels > race > machine

Only `loop` starts threads of Python; the machine has no thread, clock, device or array. Every room
may import `compiler.contract` and `memory`, and nothing else of ours.

Begin reading at `machine.transitions`, then `machine.machine`: the docstring of that file states
the one rule, why it is fast, and how a run ends. `loop.dispatch` shows the machine at work.
"""

from compiler.contract import old_names

old_names.install()
