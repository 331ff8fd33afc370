"""Whether the plans of all ranks are of one job, for their mesh: what the user has to see to.

Plans that pass and do not fit together all the same (`compiler.joint`) are of our own making.
"""

from __future__ import annotations

from compiler.errors import CompileError
from compiler.options import in_words
from compiler.plan import Plan
from compiler.rank_plans import RankPlans

_MEND = "do all ranks run the same script with the same options, and the same version?"

_OWN = ("streams", "num_streams")
"""Options that ranks choose by what their own kernels take; no order of collectives follows."""

THREADS = "threads-"
"""How the word of `Plan.target` begins that says how many threads its kernels have."""

_WITHOUT = {
    "accumulate": (1, "accumulate="),
    "zero": (False, "zero=True"),
    "clip_norm": (0.0, "clip_norm="),
    "skips_broken_steps": (False, "on_nan='skip'"),
    "evaluate_every": (0, "evaluation="),
    "memory_budget": (0, "memory_budget="),
    "recompute": ("auto", "recompute="),
    "num_streams": (1, "streams="),
}
"""By option that collectives depend on: its value where it is not asked for, and how it is."""


def check_one_job(ranks: RankPlans) -> None:
    """Check that plans are of one job with the same options, and for this mesh.

    Raises CompileError that names a rank.
    """
    _check_options(ranks)
    _check_sizes(ranks)


def how_to_do_without(plan: Plan) -> str:
    """Return the rest of a sentence: which options one may leave out that ranks meet because of."""
    given = dict(plan.options)
    asked = [word for name, (none, word) in _WITHOUT.items() if given.get(name, none) != none]
    return f"; until it is mended, try it without one of {', '.join(asked)}" if asked else ""


def _check_options(ranks: RankPlans) -> None:
    """Check that plans are of one job and for this mesh, with options that are alike."""
    first = ranks.plans[0]
    for number, plan in enumerate(ranks.plans):
        if number not in ranks.class_of:
            continue
        rank = ranks.class_of.index(number)
        if plan.mesh.names and plan.mesh != ranks.mesh:
            raise CompileError(
                f"the plan of rank {rank} is for a mesh of {plan.mesh}, and the ranks are a mesh of"
                f" {ranks.mesh}; compile the job for this mesh"
            )
        if plan.name != first.name:
            raise CompileError(
                f"rank {rank} runs job {plan.name!r} where rank 0 runs job {first.name!r}; {_MEND}"
            )
        if plan.graph_hash != first.graph_hash:
            raise CompileError(
                f"rank {rank} runs another job {plan.name!r} than rank 0: what was traced there is"
                f" not the same; {_MEND}"
            )
        if _kernels(plan) != _kernels(first):
            raise CompileError(
                f"the plan of rank {rank} is for {plan.target!r}, that of rank 0 for"
                f" {first.target!r}: with other kernels what both have would part by and by; set"
                " ACTORFLOW_NATIVE alike, and give all ranks the same compiler and libraries"
            )
        theirs, ours = dict(plan.options), dict(first.options)
        for name in sorted({*theirs, *ours}.difference(_OWN)):
            if theirs.get(name) != ours.get(name):
                words, has = in_words(name, theirs.get(name))
                raise CompileError(
                    f"ranks run job {plan.name!r} differently: {words} is {has} on rank {rank} and"
                    f" {in_words(name, ours.get(name))[1]} on rank 0; {_MEND}"
                )


def _kernels(plan: Plan) -> list[str]:
    """Return what the bits of a plan's results depend on: not on how many threads there are."""
    return [word for word in plan.target.split() if not word.startswith(THREADS)]


def _check_sizes(ranks: RankPlans) -> None:
    """Check that collectives are over as many ranks as the mesh has along their axis."""
    for number in dict.fromkeys(ranks.class_of):
        rank = ranks.class_of.index(number)
        for meeting in [m for m in ranks.meetings[number] if m.peer is None]:
            move, count = meeting.moves[0], len(ranks.group(rank, meeting))
            if move.group_size != count:
                raise CompileError(
                    f"{move} is over {move.group_size} ranks along {meeting.group!r}, where rank"
                    f" {rank} is with {count - 1} others; compile the job for this mesh"
                )
