"""The command line: `actorflow run | launch | plan | simulate | pack | ckpt | ops | top | ...`.

A command is a few lines over the library: it adds its arguments to a parser, and returns an exit
code. Answers go to stdout, errors to stderr.

main.py        `main`: parser, `run` and `plan`; hands the words of `bench` on to the clone
launch.py      `launch`; a user's script run here, and what is shown of an error that ends it
launched.py    the process of one rank, which `launch` starts as `python -m`
agent.py       the process of an agent, started as `python -m`
check.py       the script of `launch --check`: one rank per host, a table and what is wrong
simulate.py    `simulate`: the report, the network's options, what this machine was measured to take
largest_batch.py  `plan --largest-batch`: the largest batch that fits into a memory
memory_map.py  `plan --memory`: a plan's arena as boxes, as a page (page.js, map_page.js) or as PNG
plan_page.py   `plan --html`: a plan as a page of actors, timeline and memory (plan_*.js)
plan_diff.py   `plan A.plan B.plan`: what changed from one plan to another
page.py        the frame of all pages (page.html) and their style (page.css)
inspect.py     `pack`, `ckpt`, `ops` and `passes`: tables of what is there
report_page.py `report`: runs as one page
samples_page.py the rows that a run kept, as images and texts of that page
serve.py       `serve`: a server on this machine alone, and what keeps its clients from doing harm
live_pages.py  what it answers: the list of runs, and their pages (refresh.js)
series.py      metrics of a run as columns, read on from the last look
charts.py      curves over steps as SVG
runs.py        `runs` and `resume`: what runs were started with, and where they differ
replay.py      `replay`: what a past step of a run read and made
top.py         `top`: a run watched from another terminal
completion.py  `completion`: what shells read to complete commands and options
doctor.py      `doctor`: whether machine and shell are fit to train on

May import every room of actorflow but trace; actors.{collectives, device.cuda, kernels.common,
kernels.host, kernels.library, loop, machine, simulation}; compiler.{contract, graph, ops.language,
pipeline, verify}; memory. No room imports this one. benchmarks is never imported: `bench` loads
benchmarks/compare of the clone by its path.

Begin reading at main.py: `_parser` lists the commands.
"""
