"""Where a job is cut for a pipeline: `with af.stage(1):`.

A region puts the ops that are called in it on a stage; see `compiler.passes.stages` for all others.
"""

from __future__ import annotations

from actorflow.trace.tracer import current_trace, find_source
from compiler.errors import CompileError


class StageRegion:
    """A region of a job whose ops run on one stage; see `stage`. May be entered many times."""

    def __init__(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise CompileError(
                f"{find_source()}: a stage is an integer of 0 or more, got {number!r}"
                f" ({type(number).__name__}): they are counted in the order in which a batch goes"
                " through them"
            )
        self._number = number

    def __enter__(self) -> None:
        trace = current_trace()
        if trace is None:
            raise CompileError(
                f"{find_source()}: af.stage({self._number}) cuts a job, and none is traced; use it"
                " inside of a function decorated with @af.job"
            )
        trace.stages.append(self._number)

    def __exit__(self, *raised: object) -> None:
        trace = current_trace()
        if trace is not None:
            trace.stages.pop()


def stage(number: int) -> StageRegion:
    """Run what a job computes in a region on one stage of a pipeline.

        with af.stage(0):
            h = model.lower(batch.x)
        with af.stage(1):
            h = model.upper(h)

    The mesh's axis "stage" has a rank, or more along other axes, for each stage; without that axis
    one rank runs all of them. What is called outside of every region runs on the last stage that it
    reads something of. Parameters, their gradients and their optimizer's state are on the stage
    that reads them. Raises CompileError for a number that is none.
    """
    return StageRegion(number)
