"""A job's function as a graph: the trace, what it reads, and whether it still holds.

- `tracer`: records what symbolic tensors do; `job_graph`: one trace for a model and a batch.
- `signature`, `identity`: what an open plan was made for.
- `code`: a function's code by content, the names that it looks up, and whose it is.
- `reading`: what a walk over everything that a trace may read has found: rows of text.
- `data`, `classes`, `functions`: how each kind of object is read; `walk` puts them together.
- `guard`: the objects behind the rows, compared by identity in microseconds before each `step`.
- `called`: the functions that a trace has called, to find those that the walk has not met.
- `traces`: the graphs of a job and a model, each with its identity; traces again what changed.
"""
