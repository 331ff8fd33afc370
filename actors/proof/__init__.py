"""The protocol put to the proof: the same machine, and the same table, in every order there is.

- `scenario`: a random actor graph with its commands from a seed; `oracle`: what no order may
  change; `soak`: any number of seeds.
- `promela`: the transition table and a plan as a model for spin; `spin`: the plans to prove, and
  what spin says; `state_space`: the Python machine searched as exhaustively, for comparison.
- `dependencies`: a plan without any one of its dependencies is found wrong, or the others imply it;
  `promises`: what a plan promises that no byte tells.
- `mutants`: small faults of a source text; `mutate`: which of them the runtime's tests notice, and
  `equivalent_mutants.txt`: why the others are none.
"""
