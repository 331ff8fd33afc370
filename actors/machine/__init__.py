"""The actor machine: pure, without thread, clock, device or array; and what the runtime drives.

A plan becomes a `MachineTable` of ints. A `Machine` on it takes one message after another: the
table of transitions says which reaction follows, the columns change, and the machine leaves
messages to deliver and firings to run. The loop, the simulator and the tests all run this machine.

- `transitions`  states and messages, and the complete table between them, as data.
- `table`        a plan as the machine needs it: edges with rates and slots, in columns of ints.
- `columns`      all that changes, with the wiring, the invariants, and the story of an actor.
- `machine`      the rule: who fires, what that sends, and how an actor ends.
- `history`      what a run did: firings, what each waited for last, and counts.
- `errors`       how a run fails; locks that a forked child finds open.
- `protocol`     what the runtime asks of launches, host ports, clocks, devices and transports.

It may import `compiler.contract` and `memory`, and no other room of actors.

Begin reading at `transitions`, because the table there is what the machine obeys; then `machine`.
"""
