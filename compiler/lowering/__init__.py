"""From an ordered graph to the tables of a plan.

- `order`: the last pass, which says what is launched when.
- `lower`: graph to actors and launches; `step_program`: one graph on its way there.
- `storage`, `buffers`: which values share bytes; `packing`: where all registers lie.
- `chains`, `chain_actors`, `actor_graph`: who runs which launches; `launch_times`: when.
- `value_versions`: what each launch reads and writes; `version_makers`: who makes it; `carried`:
  what goes from firing to firing.
- `ports`: edges to and from the host's threads; `state`: what outlives a step; `snapshots` of it.
- `plan_builder`: the tables while they grow.
"""
