"""Many processes as one job: how ranks start, agree and end.

`messages` is what ranks and their coordinator say to each other, and `wire` how that travels.
`agreement` decides, as a function of messages alone; `coordinator` serves it to the ranks from
within the launcher, `member` is what a rank has of it. `keys` says who may talk at all. `launcher`
starts the ranks, watches them, and ends them together; `starting`, `cores` and `output` are parts
of that. See docs/ranks.md.
"""
