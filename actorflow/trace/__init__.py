"""A job's function as a logical graph, and whether that graph still holds.

A trace runs the user's function once and records forward ops, gradients and updates. What that run
may have read (modules, globals, closed-over variables, settings, code) is read as rows of text.
Before a whole run all rows are compared; before a single step a `Guard` compares identities alone.

job_graph.py        `trace_job`: forward, loss, gradients, updates; `af.grad`
traces.py           `TraceCache`: the graphs of one job on one model; what an open plan was made for
dependency_scan.py  `read_job`: the walk from model, function and optimizer to all they can reach
guard.py            `DependencyScan`, the rows of one walk; `Guard`, the cheap check of identities

May import actorflow.{environment, functional, nn, optim, options, tensor}; compiler.{contract,
graph, ops.families, ops.language, ops.primitives, pipeline}. Must not import compile, which stands
beside this room, nor distributed, run, jobs or cli; nor anything of actors.

Begin reading at job_graph.py, which makes the graph; then traces.py, which decides when.
"""
