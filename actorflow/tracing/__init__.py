"""What a trace reads, and whether it still holds.

- `code`: a function's code by content, and the names that it looks up.
- `reading`: the walk over everything that a trace may read: rows of text, and objects to compare.
- `guard`: the same objects, compared by identity in microseconds: what each `step` pays.
- `traces`: the graphs of a job and a model, each with its identity; traces again what changed.
"""
