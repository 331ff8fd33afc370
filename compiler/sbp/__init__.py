"""From one global graph to the graph of a rank: choice of SBP, boxing, pipeline stages.

`stages` gives nodes their stage before autodiff. The pass `distribute` runs on the graph of a whole
step: `infer` chooses a layout for every value, among the signatures of each op; `distribute` emits
each node on the rank's parts, with collectives between layouts, and has `stages` cut the graph of
the rank's stage out of it. `collective_schedule` gives all collectives the one order that every
rank keeps.

    distribute           the pass: layouts of all values, the graph of one rank
    infer                the choice of layouts: the problem, its times, the search
    boxing               the cheapest way from one layout to another
    derive               signatures of an op that is a program
    local_form           what a rank does of a node with its parts
    positions            where a part lies in the whole; random numbers and embeddings of parts
    stages               the pass `stages`, and the graph of one stage
    collective_schedule  buckets and order of collectives

It may import `contract`, `graph`, `storage` and the rooms of `ops`. It must not import `fusion`,
`lowering` or `passes`, which ask it for stages and for the schedule.

Begin reading at `distribute`, which uses all the others.
"""
