"""The decorator `af.job`: a function is traced, compiled and run.

decorator.py        `job`, which makes a `Job` of a function
job.py              `Job`: `fit`, `stream`, `step`, `compile`; the way from call to run
job_ranks.py        this process among the ranks of a job, and who shares the work of a step
job_spec.py         what a job asks of its plan; an evaluation's graph; a script asked for its plan
capture.py          `capture` and `patch`: jobs that return or replace what modules return

May import actorflow.{checkpoint, compile, data, distributed, environment, functional, nn, optim,
options, run, tensor, trace}; compiler.{contract, graph, ops.primitives}. Must not import cli. run,
distributed and what compiles are imported when a job is first used: to declare one loads none of
them.

Begin reading at job.py: `Job.fit` names each stage in order.
"""
