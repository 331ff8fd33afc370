"""The order of firings: what happens before what, and the accesses to bytes that nothing orders.

`check_races` proves that every two conflicting accesses of a run are ordered. It unrolls the actor
graph into firings with vector clocks, and compares the accesses of each class of bytes. For a plan
with asynchronous devices the graph is first replaced by the order that events leave.

- `happens_before`  vector clocks over unrolled periods; rounds left out; conflicts found by them.
- `waits`           which event a firing on a device waits for, and the order that this leaves.
- `race`            which bytes a firing accesses, the check, and its report in words.

The executor (`actors.device`) takes its waits from `waits`: what is proved is what runs.

It may import `actors.machine`, `compiler.contract` and `memory`.

Begin reading at `race`, because its docstring says what orders accesses, and how far to look.
"""
