"""From a plan to steps: `runner` opens a plan, `training_run` drives it over a data source.

- `fit_options`, `fitting`: what `fit` takes, and one call of it; `opening`: whether a plan may run
  here; `plan_facts`: what it says of its ends; `trace_file`: what ACTORFLOW_TRACE asks for.
- `ports`, `fetching`, `positions`: batches in; `metrics`, `report`, `status`, `console`,
  `listener`: numbers out; `saving`: checkpoints.
- `lease`, `open_model`, `live_variables`: who has a model's values.
- `stepping`: one step at a time; `stopping`, `signals`, `broken_steps`: how a run ends.
"""
