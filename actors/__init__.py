"""The runtime: runs a physical plan and nothing else.

- `protocol`: what a launch, a host port and a clock are; `errors`: how a run fails.
- `transitions`: states, messages and the table of what may follow what; `table`: a plan as plain
  ints; `wiring`, `story`, `invariants`: the machine's numbering, its messages in words, its checks.
- `machine`: the pure actor machine, messages in, actions out; no thread, no clock, no array; its
  state is in `columns`, its way to the end in `ending`.
- `explore`, `simulate`: the same machine in random orders, and on virtual time; `ranks`: many
  copies of a plan, joined by a `network`; `critical_path`: what a run's time was spent on;
  `proof/`: every order.
- `clocks`, `race`: which firing happens before which, and the accesses that nothing orders;
  `conflicts` finds them, `rounds` leaves out what comes round again.
- `arena`, `load`: from a plan to bound launches on planned bytes; `kernels/`: what launches are.
- `worker`, `dispatch`, `loop`: the threads, as `loop_options` say; `admission`: how many steps may
  begin; `open_ports`: the host's ends, until they are closed; `visit`: who looks into their memory
  from outside; `fork_lock`: locks that a forked child finds open; `failure`: an exception with its
  story; `timeline`, `launch_trace`: what happened when, and in which launch; `device/`: firings
  that are enqueued on an asynchronous device.
- `watchdog`, `stall`, `in_flight`: who holds up a run that stands still; `statistics`: what a run
  has done.
"""
