"""`actorflow bench`: the same rows in actorflow and in other engines, side by side.

The command is found in a clone by path and loaded as a package of its own, so files here import
each other relatively. Each engine has a process of its own, which runs a script of
benchmarks/engines on a row of benchmarks/rows; engines take turns, after their losses were found
equal.

command.py   arguments; which rows, which engines; the exit status
engines.py   `Engine`: script, environment, settings; `Child`, the process of one engine
disturbance.py  what other guests stole of a turn, and waiting for a core
measure.py   one row: first steps, equal losses, interleaved rounds, a busy neighbour
report.py    what was measured, as values, JSON, Markdown and PNG
page.py      the same as a page: dots with ranges

May import actorflow.{cli, environment}, actors.device.cuda and compiler.contract. Must not import
benchmarks.engines or benchmarks.rows, which run in the processes of the engines.

Begin reading at command.py: `run` is the whole comparison.
"""
