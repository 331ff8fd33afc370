"""The machine on virtual time: how long a plan will take, on one rank or on many.

The machine is the one that really runs; the clock and the streams are simulated. A calendar holds
the events to come. A firing takes its price; firings that run at once share the cores, and
collectives share the links of a network.

- `simulate`  one rank: `simulate`, the calendar, the critical path and the idle times of a run.
- `ranks`     many ranks that meet in collectives, each with its own plan, speed and jitter.
- `costs`     what a run costs beside its kernels: network, shared cores, threads and ports.

It may import `actors.kernels.common` (prices), `actors.machine` and `compiler.contract`; no room
that has threads or opens devices.

Begin reading at `simulate`, because `ranks` puts many of its `VirtualRank` into one calendar.
"""
