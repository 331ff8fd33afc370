"""Asynchronous devices: firings that are enqueued, and ordered by events.

- `protocol`: what a device is; `waits`: which firing waits for which, from the rates alone;
  `executor`: chains that enqueue; `plan`: a bound plan that a loop runs through an executor.
- `simulated`: a device on numpy whose streams lag as a seed likes; `poison`: free bytes scribbled
  over, so that a value that is read too late shows.
"""
