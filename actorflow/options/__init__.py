"""What `@af.job` and `fit` take, as value objects that check themselves where the user made them.

The functions that users call take the fields of these classes as keywords (`accepts_options`, in
environment/option_values.py), so signature, help text and checks are stated once. Each error has
the user's line, what was expected, what came, and how to mend it.

job_options.py  `JobOptions`, and `LossScale` for jobs in float16
run_spec.py     `RunSpec`, what a run is asked; `PlanOptions`, what a call asks of a plan;
                `Evaluation`; checks of models, sources, functions and callbacks
keep.py         `Keep`: which checkpoints of a run stay

May import actorflow.{callbacks, checkpoint, data, environment, nn, optim, tensor},
compiler.contract, compiler.graph and compiler.ops.families. Must not import trace, compile or run,
which read these values: what an evaluation asks of its job is the protocol `EvaluatingJob`.

Begin reading at job_options.py: run_spec.py reads the options of a job.
"""
