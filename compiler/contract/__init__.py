"""All that actors know of the compiler: the plan, and the words that it is written in.

A plan is a frozen value of rows that name each other by number. `plan_tables` has the rows, `plan`
the value of all of them with the check that numbers point at rows; `codec` stores and reads it. A
launch names its op and attributes: a fused `program` or a `region` among them says what a generated
kernel computes. With several ranks, `sbp` says what each has of a tensor, `collective` what a
launch moves between them, and `rank_plans` who meets whom.

    plan_tables  the rows: actors, launches, registers, views, arenas, variables
    plan         the plan, plans of bodies within it, the check that its tables fit together
    types        element types, tensor types, ids, bfloat16
    placement    devices, memories, streams, the mesh of ranks
    errors       the exceptions, by who is at fault
    attrs        attributes of nodes and launches
    codec        dataclasses as msgpack or JSON and back, by type and with bounds
    files        the one door to files in folders that others may write
    probe        names of outputs that a run shows or checks
    statistic    names of outputs that values of several batches follow from
    program      a fused program: its form, its rules, its functions in numpy
    spaces       where elements are in a program's rows and columns, and in windows
    region       steps over chunks of rows
    sbp          split, broadcast, partial; which slice is whose part
    collective   what a launch of a COMM actor moves between ranks
    rank_plans   the plans of all ranks, and the meetings of their COMM actors
    html_table   a value as a table in a notebook
    accounting   what the bytes of an arena are there for

It may import `memory` and nothing else of ours; every room of the floors above may import it, and
`actors` imports nothing else of the compiler.

Begin reading at `plan_tables`, whose docstring says how to read a plan; then `plan`.
"""
