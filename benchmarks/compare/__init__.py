"""The comparison with other engines: `actorflow bench`.

engines.py    which engines there are, where they live, how they are started
child.py      one engine with one row in a process of its own, and the lines to talk to it
measure.py    a row: first steps, equal losses, interleaved rounds, a busy neighbour
results.py    what was measured, as values and as JSON
report.py     as Markdown
picture.py    as PNG

The models and the engines' own halves are in `benchmarks/rows` and `benchmarks/engines`, and with
ours the arithmetic of a job and of each launch of a plan.
"""
