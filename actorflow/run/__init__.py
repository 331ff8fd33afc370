"""From a plan to steps: `runner` opens a plan, `training_run` drives it over a data source.

- `ports`, `fetching`, `positions`, `pushed`: batches in; `metrics`, `report`, `status`, `console`,
  `listener`: numbers out; `saving`: checkpoints.
- `lease`, `open_model`, `live_variables`, `runner_variables`: who has a model's values.
- `stepping`: one step at a time; `stopping`, `signals`, `broken_steps`: how a run ends.
- `plan_credits`: what a plan's control registers hold when a training goes on.
"""
