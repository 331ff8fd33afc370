"""The check on a GPU: one command, ended after five minutes, that proves and measures all.

check.sh         installs what is missing from a folder of wheels, and runs check.py
check.py         sections one after another, each a process that is killed when its time is up
section.py       what sections there are, what each is given and leaves behind
child.py         what runs in the process of one
launched.py      a few ops as a plan would launch them
rival.py         a row in torch, in a process of its own
compile_rivals.py
                 what torch compiles for those, beside the proofs
opened.py        a GPU opened, its calls counted and timed
jobs.py          the jobs of the check; their models stand in rows/ and engines/
planned.py       their plans, and launches of a plan on one's own memory
plan_gpt2.py     the plan of GPT-2 by itself, held against its marks; no part of the check
replan.py        what was measured beside what is planned by now
cases.py         calls of ops, and what they must give
results.py       what was found, as JSON and Markdown, and the table that is printed last
picture.py       predictions and what was measured, as PNG
predictions.py   what is expected of each number, written down before there was any
sections/        a module for each section
"""
