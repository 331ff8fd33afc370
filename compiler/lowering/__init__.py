"""Lowering: from an ordered logical graph to the tables of a physical plan.

`lower` takes one graph, or two where a job evaluates between its steps. For each graph it makes a
step program: launches, cut into chains, each chain on a stream. A chain becomes an actor. Values
that cross between chains become registers with slots. The plan builder collects registers, views,
actors and launches, gives registers their offsets last, and freezes the plan. In the order of work:

    buckets        a pass: collectives made one after the other become one launch
    chains         launches scheduled on streams, and cut into chains (HEFT)
    destinations   parts written where the tensor that joins them wants them
    step_program   one graph with its launches, chains, and values between chains
    plan_builder   the tables of a plan while they grow; offsets; versions
    actor_graph    actors, ports, control edges, and which actor comes before which
    chain_actors   the chains of one program as actors, and their registers
    snapshots      registers of variables, and the copies that snapshot them
    lower          the way through all of it; sub-plans of bodies; edges to the host's threads

May import: compiler.contract, graph, ops.families, ops.primitives, storage, of sbp the schedule of
collectives; memory (offsets, slots). Must not import: passes, fusion, budget, pipeline, verify. The
plan is proven by rules that lowering does not share.

Begin reading at `lower`: its docstring follows one tensor from value to offset.
"""
