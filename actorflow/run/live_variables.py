"""The variables of an open run, as others see them: read between updates, written between steps.

The values that a run trains are in its arena, and change there. A read is a copy of the values
after the last finished step, whoever asks and whenever; a write waits in `pending`, where every
read sees it, until the dispatcher writes it into the arena before the next step begins.

Of several ranks each is at a step of its own while a run goes on by itself (`fit`, `stream`), so a
read or a write there would be of another step on each: both are refused. A run that is stepped
stands still between steps, after the same one on all ranks. What is written there is handed over
when the next step is asked for (`flush`), and its digest is compared with those of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from actorflow.compile.plan_facts import saved_variables
from actorflow.distributed.distributed_run import NOTHING_WRITTEN, digest_of_state
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup, agree_on_writes
from actorflow.distributed.unshard import all_gather_variables, shard_values
from actorflow.run.training_writes import TrainingWrites
from actorflow.tensor.initial_values import check_values, initial_value, steps_done, whole_type
from actorflow.tensor.tracer import find_source, users_line
from actors.loop.admission import QuiescentCallback, QuiescentCondition
from actors.loop.bound import VariableMemory
from actors.loop.loop import Loop
from actors.machine.errors import ActorFailed
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.host_arrays import freeze
from compiler.contract.placement import HOST
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, ActorKind
from compiler.contract.sbp import shard_slices
from compiler.contract.types import RegisterId
from compiler.ops.primitives.sources import NUMBERS, SCRATCH
from compiler.ops.primitives.transfer import STAGE
from compiler.verify.verify import edges_of
from memory.registers import repetition_vector

Array = np.ndarray[Any, Any]
COUNTER = "increment"
_COUNTERS = (COUNTER, "count")
"""The op that counts in a variable; what it did by ones can be taken back."""

_KERNELS = (ActorKind.COMPUTE, ActorKind.COPY, ActorKind.COMM)


class LiveVariables:
    """The state of one run. Its methods may be called from any thread but the dispatcher's.

    Of several runs on one memory one has the turn, and each of the others asks that one. The turn
    changes on the dispatcher's thread of the run that had it, where all reads of its memory are
    made, too: so none of them meets a step of another run.

    Args:
        plan: of the run.
        variables: their memory, which stays as long as this.
        loop: of the run, perhaps not started yet.
        group: this rank among those that run the plan, each with its parts of variables.
        is_stepped: whether the run stands still between steps, on all ranks alike.
        holder: what has the turn on the same memory; None for a run that has it to itself.
        writes: what callbacks of the training write, None where there is none of these.
    """

    def __init__(
        self,
        plan: Plan,
        variables: VariableMemory,
        loop: Loop,
        group: ProcessGroup = SINGLE_PROCESS,
        *,
        is_stepped: bool = False,
        holder: LiveVariables | None = None,
        writes: TrainingWrites | None = None,
    ) -> None:
        self._group, self._writes = group, writes
        self._is_stepped = is_stepped
        self._split = {v.name for v in plan.state if v.sharding is not None}
        self._has_stages = dict(plan.mesh.axes).get(STAGE, 1) > 1
        self._plan = plan
        self._variables = variables
        self._registers = {v.name: plan.views[v.view].register for v in plan.state}
        self._loop = loop
        # Who had the turn when it was last given away; None for whose it is. No circle comes of it.
        self._next = holder
        # Guards `pending` and `_written`: user threads write, the dispatcher applies.
        self._lock = threading.Lock()
        # All values written since the last flush, of other stages too: their digest is compared.
        self._written: dict[str, Array] = {}
        self._wrote = ""
        self.pending: Mapping[str, Array] = {}
        """What was written and is not in the arena yet."""
        self.can_be_lost = any([arena.device.kind is not HOST.kind for arena in plan.arenas])
        """Whether some lie in the memory of a device, which a failure takes along."""
        self.last_read: Mapping[str, Array] | None = None
        """All variables as they were read last, where they can be lost: what is left then."""

    def __contains__(self, name: str) -> bool:
        return name in self._registers

    def may_have(self, name: str) -> bool:
        """Whether a variable is here, or may be on other stages, whose plans are not known here."""
        return self._has_stages or name in self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all variables."""
        return tuple(self._registers)

    @property
    def are_shared_out(self) -> bool:
        """Whether other ranks have what this one has not: other parts, or other stages."""
        return bool(self._split) or self._has_stages

    @property
    def lost_with(self) -> str:
        """The failure of a device that took the variables along, in its words; "" if none."""
        return self._variables.lost_with

    @property
    def is_over(self) -> bool:
        """Whether nothing will change the variables any more."""
        return self._loop.is_idle

    def read(self, names: Iterable[str]) -> dict[str, Array] | None:
        """Return read-only copies of variables, all of them after the last finished step.

        None where a failure cut an update in two, or took the memory along. Blocks until no update
        is under way. Of variables that ranks have parts of the whole ones are returned, those of
        other stages with them, and all ranks read them at the same place of their script. Raises
        CompileError where the run is being closed in the middle of a step, and where ranks may be
        at different steps, or have written different values.
        """
        all_names = tuple(names)
        if not self.has_turn:
            return self._holder.read(all_names)
        self._check_agreed("read", all_names)
        # Names of no stage at all, which the job does not read, are kept by their cells. What is
        # one stage's own is asked for by the ranks of others all the same.
        far = [name for name in all_names if name in self._split or name not in self]
        are_joined = bool(far) or self._has_stages
        copies = self._joined(all_names) if are_joined else self._own(all_names)
        if self.can_be_lost and copies is not None and len(copies) == len(self._registers):
            self.last_read = copies
        return copies

    def _joined(self, wanted: tuple[str, ...]) -> dict[str, Array] | None:
        """Return whole variables, when all ranks have done the same steps."""
        self.agree_on_writes()
        group, counter = self._group, [name for name in ("step",) if name in self]
        here = [name for name in wanted if name in self]
        while (values := self._own((*here, *counter))) is not None:
            # Outputs of a step come before its updates: a rank may have been read too early. One
            # that updates nothing is never too early.
            steps = group.all_gather_object(
                "read variables between steps", steps_done(values) if counter else None
            )
            if len({*steps} - {None}) <= 1:
                parts = {name: values[name] for name in here}
                return all_gather_variables(self._plan, parts, group.all_gather_object, group.rank)
        return None

    def _own(self, wanted: tuple[str, ...]) -> dict[str, Array] | None:
        """Return copies of what this rank has."""
        copies: dict[str, Array] = {}

        def look() -> None:
            if self.has_turn:
                copies.update(self._copy(wanted))

        rest = self._between_steps if self._is_stepped else self._between_updates(wanted)
        visit = QuiescentCallback(rest, look)
        self._loop.run_when_quiescent(visit)
        is_made = visit.wait()
        if not copies and not self.has_turn:
            return self._holder._own(wanted)  # the turn went to another run before the visit
        if is_made:
            return copies
        if not self._loop.is_idle:
            raise CompileError(
                f"plan {self._plan.name!r} is being closed in the middle of a step: its variables"
                " are neither those before the step nor those after it. Read them when it is closed"
            )
        # The loop is idle, so this thread may read the arena itself.
        return None if self._updates() is None else self._copy(wanted)

    def write(self, values: Mapping[str, Array]) -> None:
        """Give variables new values from the next step on; unknown names are left out.

        The arrays must not change any more. Waits for nothing. Raises CompileError for other types,
        and where ranks may be at different steps. Of several ranks each is told all names, those of
        other stages as well: what is written has to be the same on all.
        """
        own_values = {name: array for name, array in values.items() if name in self}
        check_values(self._plan, own_values)
        self._check_agreed("written", tuple(values))
        with self._lock:
            is_ours = self.has_turn
            if is_ours:
                # A new dict each time: readers hold the old one without a lock.
                self.pending = {**self.pending, **own_values}
                if self.last_read is not None:
                    self.last_read = {**self.last_read, **own_values}
                if values and not self._group.is_alone:
                    self._written |= values
                    self._wrote = users_line()
        if not is_ours:
            self._holder.write(values)
            return
        if self._writes is not None:
            self._writes.add(self._cut(own_values))
        if own_values and (self._group.is_alone or not self._is_stepped):
            # Alone the write may take effect at any step's edge. Several ranks that are stepped
            # wait for `flush`, which is called at the same step on all; a run stands still while
            # a callback writes.
            self._apply_soon()

    @property
    def _holder(self) -> LiveVariables:
        holder = self
        while (following := holder._next) is not None:
            holder = following
        return holder

    @property
    def has_turn(self) -> bool:
        """Whether no other run on the same memory has the turn."""
        return self._next is None

    def come_to_rest(self, look: Callable[[], object] = lambda: None) -> None:
        """Wait until no step is under way, on no device; `look` is called then.

        Raises InternalError where the run is over.
        """
        holder = self._holder
        visit = QuiescentCallback(replace(holder._between_steps, is_idle=True), look)
        holder._loop.run_when_quiescent(visit)
        if not visit.wait():
            raise InternalError(f"plan {self._plan.name!r} ended while another one took its turn")

    def take_turn(self) -> None:
        """Take the turn from the run that has it, when no step of that one is under way.

        What other plans have overwritten is there again, and what was written meanwhile is there
        before the next step.
        """
        before = self._holder
        if before is self:
            return

        def give_turn() -> None:
            self._variables.refill()
            with before._lock:
                self.pending, before.pending = before.pending, {}
                self._written, before._written = before._written, {}
                self._wrote, self.last_read = before._wrote, before.last_read
                self._next, before._next = None, self

        before.come_to_rest(give_turn)
        if self.pending and self._group.is_alone:
            self._apply_soon()

    def _apply_soon(self) -> None:
        self._loop.run_when_quiescent(
            QuiescentCallback(self._between_steps, lambda: self._apply(self.pending))
        )

    def flush(self) -> tuple[int, str]:
        """Apply what was written to one of several ranks before the next step.

        To be called when that step is asked for, and not admitted yet, so that what another thread
        writes belongs to one step for certain. Return the digest of what was written since the last
        call, 0 for nothing, and the user's line.
        """
        with self._lock:
            written, self._written, pending = self._written, {}, self.pending
        if not written:
            return NOTHING_WRITTEN
        if pending:
            self._loop.run_when_quiescent(
                QuiescentCallback(self._between_steps, lambda: self._apply(pending))
            )
        return digest_of_state(written), self._wrote

    def agree_on_writes(self) -> None:
        """Check that all ranks wrote the same since the last step; all call it. CompileError."""
        if not self._group.is_alone:
            agree_on_writes(self._group, digest_of_state(self._written), self._wrote)

    def _are_at_one_step(self, names: tuple[str, ...]) -> bool:
        """Whether all ranks stand at a step, and what has these names is whole on each."""
        if self._group.is_alone:
            return True
        # Parts of others would be gathered, for which there is one thread on each rank.
        is_whole = not self._has_stages and self._split.isdisjoint(names)
        return is_whole and self._writes is not None and self._writes.are_ranks_at_one_step

    def _check_agreed(self, done: str, names: tuple[str, ...]) -> None:
        if names and not (self._is_stepped or self._loop.is_closed or self._are_at_one_step(names)):
            raise CompileError(
                f"{find_source()}: {names[0]!r} is {done} while plan {self._plan.name!r} runs on"
                f" {self._plan.mesh.num_ranks} ranks, which may be at different steps, so its"
                " shards would belong to different steps. Do so before or after the run, or"
                " between calls of job.step; for an evaluation give evaluation="
            )

    def whole(self) -> dict[str, Array] | None:
        """Return all variables of a loop that is closed, a rank's parts; None where `read` does.

        A step that fails before its first update leaves them whole, and so does a failure outside
        of the actors that update, unless it finds some of them further than others. Counters that
        were ahead of the updates are set back to them.
        """
        updates = self._updates()
        if updates is None:
            return None
        variables = {name: self._variables.read(name) for name in self.names}
        # After an end in order counters and updates agree; only a failure or a cut sets them apart.
        if updates and (self._failed is not None or self._loop.is_cut):
            self._set_back(variables, max(updates), self._failed)
        for array in variables.values():
            freeze(array)
        return {**variables, **self._cut(self.pending)}

    def changed_after(self, steps: int) -> str:
        """Return a saved variable that is not as some steps leave it, after a loop was cut; or "".

        Each has to be written as often, but for counters: `saved_after` sets those back.
        """
        ended = self._loop.ended_firings()
        for actor in self._plan.actors:
            for launch in actor.launches:
                registers = {self._plan.views[view].register for view in launch.outputs}
                names = [n for n in self._saved if self._registers[n] in registers]
                if names and launch.op != COUNTER and ended[actor.id] != steps:
                    return names[0]
        return "" if self._updates() in (set(), {steps}) else "what follows from a variable"

    def saved_after(self, steps: int) -> dict[str, Array]:
        """Return what a checkpoint after some steps holds, of which none is changed: own parts."""
        variables = {name: self._variables.read(name) for name in self._saved}
        self._set_back(variables, steps, None)
        return variables

    def when_updated(self, steps: int) -> QuiescentCondition:
        """Return when all that is saved was written in so many steps, and the run has come to rest.

        Sources may block meanwhile, and what meets other ranks, which may not come any more.
        """
        waits = (ActorKind.SOURCE, ActorKind.COMM)
        still = frozenset([int(a.id) for a in self._plan.actors if a.kind not in waits])
        writers = {a for n in self._saved for a in self._writers.get(self._registers[n], ())}
        # One round a writer: each by itself has to reach `steps`; they need not be equally far.
        each = tuple([((actor, 1),) for actor in sorted(writers)])
        return QuiescentCondition(still, each, least=steps, is_idle=True)

    # -- on the dispatcher's thread --------------------------------------------------------------

    def _copy(self, names: tuple[str, ...]) -> dict[str, Array]:
        pending = self._cut({n: a for n, a in self.pending.items() if n in names})
        return {n: pending[n] if n in pending else self._read(n) for n in names}

    def _cut(self, written: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return what this rank has of values that were written."""
        return shard_values(self._plan, written, self._group.rank) if self._split else written

    def _read(self, name: str) -> Array:
        array = self._variables.read(name)
        freeze(array)
        return array

    def _apply(self, written: Mapping[str, Array]) -> None:
        """Write into the arena what waits for it, unless the turn went to another run with it."""
        if not self.has_turn:
            return
        for name, array in self._cut(written).items():
            self._variables.write(name, array)
        with self._lock:
            # By identity: a value that was written again meanwhile stays for the next visit.
            pending = self.pending
            self.pending = {n: a for n, a in pending.items() if a is not written.get(n)}

    # -- when ------------------------------------------------------------------------------------

    def _between_updates(self, names: Iterable[str]) -> QuiescentCondition:
        """Return when variables can be read: all that write them have done so equally often."""
        writers = {a for name in names for a in self._writers.get(self._registers[name], ())}
        # Sorted, so that the condition is the same tuple in every run.
        rounds = tuple([(actor, 1) for actor in sorted(writers)])
        return QuiescentCondition(frozenset(writers), (rounds,) if rounds else ())

    @cached_property
    def _saved(self) -> tuple[str, ...]:
        """The variables that a checkpoint holds."""
        return saved_variables(self._plan)

    @cached_property
    def _writers(self) -> dict[RegisterId, set[int]]:
        """The actors that write into each register."""
        writers: dict[RegisterId, set[int]] = {}
        for actor in self._plan.actors:
            for launch in actor.launches:
                for view in launch.outputs:
                    writers.setdefault(self._plan.views[view].register, set()).add(int(actor.id))
        return writers

    @cached_property
    def _between_steps(self) -> QuiescentCondition:
        """When variables can be written: no step has begun and not ended, and no evaluation.

        What touches no variable counts for none: copies beside steps are never where the steps are.
        The kernels of an evaluation follow from the actor that gives leave for it. What fires once
        in many steps without being part of one (a snapshot) must only not be running.
        """
        actors = self._plan.actors
        edges, _ = edges_of(self._plan)
        repetitions = repetition_vector(len(actors), edges)
        ids = {a.name: int(a.id) for a in actors}
        evaluates = {ids["evaluation"]} if "evaluation" in ids else set()
        is_growing = bool(evaluates)
        # A fixed point over the consumers: all that follows from the evaluation's actor, in few
        # rounds.
        while is_growing:
            further = {e.consumer for e in edges if e.producer in evaluates}
            is_growing = not further <= evaluates
            evaluates |= further
        kernels = [int(a.id) for a in actors if a.kind in _KERNELS]
        # One that reads weights in bfloat16 alone is part of a step, too.
        variables = [v for v in self._plan.variables if v.role != SCRATCH]
        state = {self._plan.views[v.view].register for v in variables}
        within = [a for a in kernels if a not in evaluates and not actors[a].is_flushed]
        steps = [a for a in within if not self._touched(actors[a]).isdisjoint(state)]
        # The repetition vector is of a whole period, which may hold many steps: the gcd is one
        # step.
        per_step = gcd(*[repetitions[a] for a in steps])
        rounds = [tuple([(a, repetitions[a] // per_step) for a in steps])] if steps else []
        if evaluates:
            per_evaluation = repetitions[ids["evaluation"]]
            parts = [a for a in kernels if a in evaluates]
            rounds.append(tuple([(a, repetitions[a] // per_evaluation) for a in parts]))
        return QuiescentCondition(frozenset(kernels), tuple(rounds))

    def _touched(self, actor: Actor) -> set[RegisterId]:
        views = [view for x in actor.launches for view in (*x.inputs, *x.outputs)]
        return {self._plan.views[view].register for view in views}

    # -- after the end ---------------------------------------------------------------------------

    @property
    def _failed(self) -> ActorFailed | None:
        failure = self._loop.failure
        return failure if isinstance(failure, ActorFailed) else None

    def _updates(self) -> set[int] | None:
        """Return how often variables were changed; None where in part, or where they are lost."""
        if self.lost_with:
            return None
        ended, failed = self._loop.ended_firings(), self._failed
        counts: set[int] = set()
        for actor in self._plan.actors:
            first = self._first_update(actor)
            is_failed = failed is not None and actor.name == failed.actor
            # A failing launch may have written part of its output: in the first update or after it
            # all is lost.
            if failed is not None and is_failed and self._is_cut(actor, first, failed.launch):
                return None
            if first is None:
                continue
            # `ended_firings` counts the failed firing as ended.
            counts.add(ended[actor.id] - is_failed)
        return None if len(counts) > 1 else counts

    def _is_cut(self, actor: Actor, first_update: int | None, launch: int | None) -> bool:
        """Whether an actor that failed in this launch can have changed variables before it."""
        if launch is None:  # any can have been the one: what the actor counts is in doubt as well
            return first_update is not None or any(x.op in _COUNTERS for x in actor.launches)
        return first_update is not None and launch >= first_update

    def _set_back(
        self, variables: dict[str, Array], steps: int, failed: ActorFailed | None
    ) -> None:
        """Make the counters say what some steps of this run leave there."""
        names = {register: name for name, register in self._registers.items()}
        ended = self._loop.ended_firings()
        for actor in self._plan.actors:
            # The first launch of a firing that failed that is not done.
            lost = failed.launch if failed is not None and actor.name == failed.actor else None
            for index, launch in enumerate(actor.launches):
                register = self._plan.views[launch.outputs[0]].register
                if launch.op == COUNTER and names.get(register) in variables:
                    is_lost = lost is not None and lost <= index
                    counted = ended[actor.id] - is_lost
                    # In place on the copy that `read` returned, not on the arena.
                    variables[names[register]] -= counted - steps

    def _first_update(self, actor: Actor) -> int | None:
        """Return the first launch of an actor that writes state, but for counters."""
        registers = set(self._registers.values())
        for index, launch in enumerate(actor.launches):
            written = {self._plan.views[view].register for view in launch.outputs}
            if launch.op not in _COUNTERS and not written.isdisjoint(registers):
                return index
        return None


def numbers_of_rows(plan: Plan, rank: int) -> dict[str, Array]:
    """Return one rank's part of the variables that hold 0, 1, 2, ..., by name.

    They are no state: plans on one memory have them each for itself, by the rows of their batches.
    """
    parts: dict[str, Array] = {}
    for variable in plan.variables:
        if variable.role == NUMBERS:
            type_, part = whole_type(plan, variable), variable.sharding
            own = None if part is None else shard_slices(part, plan.mesh, rank)
            parts[variable.name] = initial_value(variable.name, type_, variable.init, 0, own)
    return parts
