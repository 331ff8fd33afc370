"""Development: the same machine and the same plans, put to the proof.

Three questions have tools here. Does the machine hold in every order of events: an oracle plays
random orders, and spin searches all orders of small plans. Does every part count: plans lose one
dependency, sources one place, and something must notice. Does a plan wait for all that it needs:
devices are late on purpose, and free bytes hold garbage.

- `oracle`        random scenarios in random orders, and how each must come out.
- `soak`          the oracle by the million seeds, as a command.
- `promela`       a plan and the transition table as a model for spin.
- `spin`          small plans proved by spin, and the machine searched beside it, as a command.
- `dependencies`  a plan without any one of its dependencies, as a command.
- `mutate`        the runtime with one fault at a time, against its tests, as a command;
                  `equivalent_mutants.txt` says which faults change nothing.
- `simulated`     late devices on the host, and plans whose free bytes are poisoned.
- `emulated`      a CUDA driver acted by the host, in a room of its own.

It may import `actors.device`, `actors.kernels`, `actors.race`, `actors.machine` and
`compiler.contract`, and never `actors.loop`. Of its files only `simulated` and `emulated` are used
by a run, where a setting asks for such a device.

Begin reading at `oracle`, because its checks say what a right run is.
"""
