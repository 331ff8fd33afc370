"""Firings on the streams of devices, and the host as a device.

An executor makes the chains that the loop runs: on the host as they are, on an asynchronous device
as launches enqueued between waits for events. Which event a firing waits for is computed by
`actors.race.waits`, which the race check uses too.

- `executor`  one run of an actor graph on its devices: events, gates, and who is at fault.
- `host`      the host as a device: a launch is done when it returns.
- `cuda`      CUDA devices, in a room of their own.

The executor knows devices by their protocol only: `host` and `cuda` do not import each other, and
`executor` imports neither.

It may import `actors.race`, `actors.machine`, `actors.kernels.common`, `actors.kernels.library` and
`compiler.contract`.

Begin reading at `executor`, because its docstring says what DONE means on an asynchronous device.
"""
