"""The command line: `actorflow run | launch | plan | simulate | pack | ckpt | ops | top | ...`.

A command is a few lines over the library: it adds its arguments to a parser, and returns an exit
code. Answers go to stdout, errors to stderr.

main.py        `main`: parser, `run` and `plan`; hands the words of `bench` on to the clone
launch.py      `launch`; a user's script run here, and what is shown of an error that ends it
launched.py    the process of one rank, which `launch` starts as `python -m`
agent.py       the process of an agent, started as `python -m`
check.py       the script of `launch --check`: one rank per host, a table and what is wrong
simulate.py    `simulate`: the report, the network's options, what this machine was measured to take
memory_map.py  `plan --memory`: a plan's arena as boxes, as a page (page.html, page.js) or as PNG
inspect.py     `pack`, `ckpt`, `ops` and `passes`: tables of what is there
top.py         `top`: a run watched from another terminal
doctor.py      `doctor`: whether machine and shell are fit to train on

May import every room of actorflow but trace; actors.{collectives, device.cuda, kernels.common,
kernels.host, kernels.library, loop, simulation}; compiler.{contract, graph, ops.language, pipeline,
verify}; memory. No room imports this one. benchmarks is never imported: `bench` loads
benchmarks/compare of the clone by its path.

Begin reading at main.py: `_parser` lists the commands.
"""
