"""Prove that every read finds the version that it names, and that each version has one maker.

The bytes of a plan are used again and again: in place, by variables, by slots. Here the launches
are played in order, and for each place the version that was written there last is kept. A launch
that was dropped, swapped, doubled or given another operand reads what it did not name, and that is
an error with both lines of the user's program.

What is kept is one version for each place of a register (`compiler.verify.places`); that registers
in use at the same time lie apart is what `compiler.verify.verify` proves beside this.

**Inside a chain** the launches run in order, so one firing says it all: temporaries and outputs
begin empty. **Between chains** a token is what its producer left in the slot, which nobody else may
write; so a consumer reads what the producer's firing ends with. **Variables** are carried from one
firing to the next. Who reads them in another actor than the one that writes them is right only if
the writer has fired just so often: those reads are returned, and `LoopCarriedCount` counts them. So
it is with a token that one of its consumers updates in place, for all others who read it.

Source: the versions are those of static single assignment (Cytron et al., 1991).
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.contract.errors import InternalError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, ActorKind, Launch, RegisterKind
from compiler.contract.types import RegisterId
from compiler.ops.primitives.sources import PACKED
from compiler.verify.places import (
    NO_BYTES,
    NOWHERE,
    LoopCarried,
    LoopCarriedRead,
    ReadTime,
    StridedRange,
    WrittenWindows,
    form_of,
)

NOTHING = -1
"""The version of bytes into which nothing has been written yet, or a workspace."""

Maker = str | tuple[Actor, int]
"""A launch of an actor, or something in words."""


class VersionMakers:
    """Each version has one maker."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._makers: dict[int, Maker] = {}

    def make(self, version: int, maker: Maker) -> None:
        """Record the maker of a version. Raises InternalError where it has another maker."""
        if version < 0 or self._makers.setdefault(version, maker) is not maker:
            raise InternalError(
                f"{self.text(maker)} makes version {version}, and so does"
                f" {self.text(self._makers.get(version, 'nothing that may'))}"
            )

    def version(self, version: int) -> str:
        """Return a version in words."""
        if version == NOTHING:
            return "nothing yet"
        maker = self._makers.get(version)
        return f"version {version}" + (f" of {self.text(maker)}" if maker else "")

    def register(self, view: int) -> str:
        """Return the register of a view in words."""
        return f"register {self._plan.registers[self._plan.views[view].register].name!r}"

    def error(self, actor: Actor, index: int, problem: str) -> InternalError:
        """Return an error that begins with a launch, its op and the user's line."""
        return InternalError(f"{self.text((actor, index))} {problem}")

    def text(self, maker: Maker) -> str:
        """Return a maker in words."""
        if isinstance(maker, str):
            return maker
        actor, index = maker
        launch = actor.launches[index]
        source = self._plan.sources[launch.source]
        return f"launch {index} ({launch.op}, {source}) of {actor.name!r}"


def interpret_chains(plan: Plan, extents: Sequence[StridedRange]) -> LoopCarried:
    """Play every chain once; return what else there is to prove between them. O(operands).

    `extents` are those of the views, which lie inside their registers. What the plan's tables say
    of one another holds (`check_references`).

    Raises InternalError naming the first launch, field or register that is wrong.
    """
    return _Play(plan, extents).run()


class _Play:
    """The version in every place while the launches run, and the maker of each version."""

    def __init__(self, plan: Plan, extents: Sequence[StridedRange]) -> None:
        self._plan = plan
        self._places = WrittenWindows(plan, extents)
        self._held = [NOTHING] * len(self._places)
        # A dense view of a whole place: its version is held there, and no form or part is looked
        # up.
        pairs = zip(self._places.is_whole, extents, strict=True)
        self._is_plain = [is_whole and extent.is_dense for is_whole, extent in pairs]
        self._makers = VersionMakers(plan)
        self._make, self._error = self._makers.make, self._makers.error
        self._named = self._makers.register
        self._owner: dict[int, int] = {}
        self._readers: set[tuple[int, RegisterId]] = set()
        self._variable_at: dict[int, int] = {}
        self._writer: dict[int, int] = {}
        self._updated: dict[int, tuple[int, int]] = {}
        self._carried: list[LoopCarriedRead] = []
        self._of_variables: list[tuple[int, int, int, ReadTime]] = []
        self._received: list[tuple[int, int, int, int, int]] = []
        self._forms: dict[int, tuple[tuple[int, int], ...]] = {}
        """How the elements of a version lie that was not written row by row."""
        self._joined: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Pairs (place, version) of which a joined version at its place consists."""
        self._made_at: dict[int, int] = {}
        """The place of each version that is written, or joined, where places lie in one another."""

    def run(self) -> LoopCarried:
        self._take_forms()
        self._take_joins()
        self._take_ports()
        self._take_state()
        for actor in self._plan.actors:
            self._play(actor)
        self._check_tokens()
        self._check_written()
        self._carry_variables()
        return LoopCarried(tuple(self._carried), tuple(self._writer.items()))

    # -- what is there before anything runs --

    def _take_forms(self) -> None:
        """Note how versions lie that are written, or joined, in other ways than row by row."""
        plan, places = self._plan, self._places
        pairs = [
            pair
            for actor in plan.actors
            for launch in actor.launches
            for pair in zip(launch.outputs, launch.writes, strict=True)
        ]
        for view, version in (*pairs, *[(join.output, join.version) for join in plan.joins]):
            if not places.extents[view].is_dense:
                self._forms[version] = form_of(plan.views[view])
            place = places.of_view[view]
            if place in places.joints or place in places.atoms:
                self._made_at[version] = place

    def _take_joins(self) -> None:
        """Note what the joined versions consist of. Raises InternalError where that is not all."""
        plan, places = self._plan, self._places
        for join in plan.joins:
            what = f"the join ({plan.sources[join.source]})"
            self._make(join.version, what)
            whole = places.of_view[join.output]
            if whole == NO_BYTES:
                continue
            parts: list[tuple[int, int]] = []
            for view, number in zip(join.inputs, join.reads, strict=True):
                if places.of_view[view] == NO_BYTES:
                    continue
                parts.append(self._named_at(view, number, what))
            sizes = [places.size_bytes(place) for place, _ in parts]
            if sum(sizes) != places.size_bytes(whole) or not places.is_whole[join.output]:
                raise InternalError(
                    f"{what} has parts that are not all of {self._named(join.output)}"
                )
            self._joined[whole, join.version] = parts

    def _named_at(self, view: int, number: int, who: Maker) -> tuple[int, int]:
        """Return place and version that a read names, once the view shows just that.

        Raises InternalError where it shows anything else.
        """
        places, window = self._places, self._plan.views[view]
        if number >= 0:
            form = self._forms.get(number)
            is_dense = places.extents[view].is_dense
            if places.is_whole[view] and (is_dense if form is None else form_of(window) == form):
                return places.of_view[view], number
            raise InternalError(
                f"{self._makers.text(who)} reads a part of {self._named(view)}, and names the whole"
            )
        part = self._plan.parts[-1 - number]
        if window.strides_bytes == part.strides_bytes:
            start = window.offset_bytes - part.offset_bytes
            matches = [p for p in places.around(view) if places.start(p) == start]
            if matches:
                # A joined tensor and its first part begin alike: the version tells which is meant.
                made_at = self._made_at.get(part.version)
                return (made_at if made_at in matches else matches[0]), part.version
        raise InternalError(
            f"{self._makers.text(who)} reads another part of {self._named(view)} than named"
        )

    def _holds(self, place: int, version: int) -> bool:
        """Whether a place holds a version: as written there, or part by part."""
        if all([self._held[atom] == version for atom in self._places.atoms_of(place)]):
            return True
        parts = self._joined.get((place, version))
        return parts is not None and all([self._holds(*part) for part in parts])

    def _held_not(self, place: int, version: int) -> int:
        """Return what a place holds that is not a version, for an error.

        Of a joint that is what the first such part of it holds, and of a token what its updater
        leaves there.
        """
        versions = [self._held[atom] for atom in self._places.atoms_of(place)]
        updated = [self._updated[place][1]] if place in self._updated else []
        return next((other for other in (*updated, *versions) if other != version), version)

    def _hold(self, place: int, version: int) -> None:
        if place not in self._places.atoms:
            self._held[place] = version
            return
        for atom in self._places.atoms[place]:
            self._held[atom] = version

    def _take_ports(self) -> None:
        """Give every edge its one producer, and take over what sources leave in theirs."""
        plan = self._plan
        for actor in plan.actors:
            for port in actor.inputs + actor.outputs:
                is_data = plan.registers[port.register].kind is RegisterKind.DATA
                if actor.launches and is_data and port.rate != 1:
                    raise InternalError(
                        f"{actor.name!r} moves {port.rate} tokens of register"
                        f" {plan.registers[port.register].name!r} per firing, and launches see one"
                    )
            for port in actor.outputs:
                if self._owner.setdefault(port.register, actor.id) != actor.id:
                    names = [plan.actors[self._owner[port.register]].name, actor.name]
                    raise InternalError(
                        f"register {plan.registers[port.register].name!r} has two producers,"
                        f" {names[0]!r} and {names[1]!r}"
                    )
            ports = actor.inputs + actor.outputs
            self._readers.update([(actor.id, port.register) for port in ports])
        for item in plan.fields:
            self._expect_rows(item.view)
            owner = self._owner.get(item.register)
            if owner is not None and plan.actors[owner].kind is ActorKind.SOURCE:
                self._make(item.version, f"field {item.name!r} ({plan.sources[item.source]})")
                self._fill(item.view, item.version)

    def _take_state(self) -> None:
        plan = self._plan
        for index, constant in enumerate(plan.constants):
            self._expect_rows(constant.view)
            self._make(constant.version, f"constant {index}")
            self._fill(constant.view, constant.version)
        for index, variable in enumerate(plan.variables):
            self._expect_rows(variable.view)
            self._make(variable.before, f"variable {variable.name!r}")
            if variable.before != variable.after:
                self._make(variable.between, f"variable {variable.name!r} between steps")
            elif variable.between != variable.before:
                raise InternalError(
                    f"nothing writes variable {variable.name!r}, so it has one version"
                )
            place = self._places.of_view[variable.view]
            if place >= 0 and self._variable_at.setdefault(place, index) != index:
                raise InternalError(f"variable {variable.name!r} lies in the bytes of another one")

    def _expect_rows(self, view: int) -> None:
        if not self._places.extents[view].is_dense:
            kind = self._plan.registers[self._plan.views[view].register].kind.value
            raise InternalError(f"{self._named(view)} does not hold its {kind} row by row")

    def _fill(self, view: int, version: int) -> None:
        place = self._places.of_view[view]
        if place == NO_BYTES:
            return
        if not self._holds(place, NOTHING):
            name = self._plan.registers[self._places.register[place]].name
            raise InternalError(f"two values lie in the same bytes of register {name!r}")
        self._hold(place, version)

    # -- a chain --

    def _play(self, actor: Actor) -> None:
        written: list[int] = []
        for index, launch in enumerate(actor.launches):
            self._read(actor, index, launch)
            self._write(actor, index, launch, written)
        # The next firing finds variables as carried over, and nobody else finds them as left here.
        for place in written:
            if place in self._variable_at:
                self._held[place] = NOTHING

    def _read(self, actor: Actor, index: int, launch: Launch) -> None:
        of_view, held, owner = self._places.of_view, self._held, self._owner
        register_of, is_plain, forms = self._places.register, self._is_plain, self._forms
        for view, number in zip(launch.inputs, launch.reads, strict=True):
            place = of_view[view]
            if place == NO_BYTES:
                continue
            if place == NOWHERE:
                raise self._error(actor, index, f"reads {self._named(view)}, which nothing writes")
            version = number
            # A part, an odd form or a view with gaps is looked up; all others are at their own
            # place.
            if number < 0 or not is_plain[view] or number in forms:
                place, version = self._named_at(view, number, (actor, index))
            if owner.get(register_of[place]) != actor.id:
                self._read_foreign(actor, index, view, (place, version))
            # The first test settles almost all reads; a joined version is held part by part.
            elif held[place] != version and not self._holds(place, version):
                raise self._stale(actor, index, view, version)

    def _read_foreign(self, actor: Actor, index: int, view: int, named: tuple[int, int]) -> None:
        """Check a read of what is not made in this chain, or remember it until all is known."""
        place, version = named
        register = self._plan.registers[self._places.register[place]]
        if register.kind is RegisterKind.CONSTANT:
            if not self._holds(place, version):
                raise self._stale(actor, index, view, version)
        elif register.kind is RegisterKind.VARIABLE:
            self._read_variable(actor, index, view, version)
        elif self._updated.get(place, (NOTHING,))[0] == actor.id:
            if self._updated[place][1] != version:
                raise self._stale(actor, index, view, version)
        elif (actor.id, register.id) in self._readers:
            self._received.append((actor.id, index, view, place, version))
        elif register.kind is RegisterKind.TEMPORARY:
            raise self._error(
                actor, index, f"reads {self._named(view)} before anything in its chain wrote it"
            )
        else:
            raise self._error(
                actor, index, f"touches {self._named(view)}, which is on none of its ports"
            )

    def _read_variable(self, actor: Actor, index: int, view: int, version: int) -> None:
        place = self._places.of_view[view]
        # This chain has written it already in this firing: that write counts.
        if self._held[place] != NOTHING:
            if self._held[place] != version:
                raise self._stale(actor, index, view, version)
            return
        number = self._variable_of(view)
        variable = self._plan.variables[number]
        if variable.before == variable.after == version:
            # Nothing writes it, so that it makes no difference when it is read.
            return
        if version == variable.before:
            when = ReadTime.BEFORE
        elif version == variable.after:
            when = ReadTime.AFTER
        elif version == variable.between:
            when = ReadTime.BETWEEN
        else:
            raise self._stale(actor, index, view, version)
        self._of_variables.append((actor.id, index, number, when))

    def _variable_of(self, view: int) -> int:
        """Return the number of the variable that a view on its register shows."""
        number = self._variable_at.get(self._places.of_view[view])
        if number is None:
            raise InternalError(f"{self._named(view)} has bytes that are no variable's")
        return number

    def _write(self, actor: Actor, index: int, launch: Launch, written: list[int]) -> None:
        of_view, atoms_of = self._places.of_view, self._places.atoms_of
        reads = {of_view[view] for view in launch.inputs}
        # Who reads a joint reads all of its atoms.
        for joint in reads & self._places.atoms.keys():
            reads.update(atoms_of(joint))
        filled: list[int] = []
        for view, version in zip(launch.outputs, launch.writes, strict=True):
            self._make(version, (actor, index))
            place = of_view[view]
            if place == NO_BYTES:
                continue
            atoms = atoms_of(place)
            is_update = not reads.isdisjoint(atoms)
            # An update of another chain's token is noted in `_updated`; the place goes on holding
            # what
            # the producer left, for the other consumers.
            if self._own(actor, index, view, version, is_update=is_update):
                self._hold(place, version)
            is_safe = not is_update or self._reads_whole(launch, view, place)
            if not is_safe or not set(atoms).isdisjoint(filled):
                raise self._error(
                    actor, index, f"writes {self._named(view)} over what it reads or writes too"
                )
            filled += atoms
        if launch.workspace is not None:
            place = of_view[launch.workspace]
            if place in filled or place in reads:
                raise self._error(actor, index, "has its workspace in the bytes of an operand")
            if place != NO_BYTES:
                self._own_workspace(actor, index, launch.workspace)
        written += filled

    def _reads_whole(self, launch: Launch, written: int, place: int) -> bool:
        """Whether all that a launch reads of a place it writes is the whole of it."""
        of_view, atoms_of = self._places.of_view, self._places.atoms_of
        # Places that lie in no other, and hold none, share no bytes with others.
        is_nested = place in self._places.atoms or place in self._places.joints
        atoms = set(atoms_of(place))
        for view, number in zip(launch.inputs, launch.reads, strict=True):
            other = of_view[view]
            if other == place:
                # What was written in another order is a part by name: it may be read row by row
                # where it is written so.
                if number < 0 and not (self._is_plain[view] and self._is_plain[written]):
                    return False
            elif is_nested and not atoms.isdisjoint(atoms_of(other)):
                return False
        return True

    def _own(self, actor: Actor, index: int, view: int, version: int, *, is_update: bool) -> bool:
        """Check that this launch may write here; whether the place is its chain's own.

        `is_update`: it reads the place as well.
        """
        place = self._places.of_view[view]
        register = self._plan.registers[self._places.register[place]]
        if not self._places.is_whole[view]:
            raise self._error(actor, index, f"writes {self._named(view)} with gaps")
        if register.kind is RegisterKind.TEMPORARY:
            if self._owner.setdefault(register.id, actor.id) != actor.id:
                raise self._error(actor, index, f"writes {self._named(view)} of another chain")
        elif register.kind is RegisterKind.VARIABLE:
            variable = self._variable_of(view)
            if self._plan.variables[variable].after != version:
                raise self._error(
                    actor,
                    index,
                    f"leaves version {version} in {self._named(view)}, which is said to end a step"
                    f" with {self._plan.variables[variable].after}",
                )
            self._writer[variable] = actor.id
        elif register.kind is not RegisterKind.DATA or self._owner.get(register.id) != actor.id:
            is_read = (actor.id, register.id) in self._readers
            updater, _ = self._updated.get(place, (actor.id, NOTHING))
            if not (is_update and is_read and updater == actor.id):
                raise self._error(
                    actor, index, f"writes {self._named(view)}, which it does not produce"
                )
            self._updated[place] = actor.id, version
            return False
        return True

    def _own_workspace(self, actor: Actor, index: int, view: int) -> None:
        """Check that this launch may leave anything in its workspace; let it hold nothing."""
        register = self._plan.registers[self._plan.views[view].register]
        is_kept = register.kind is RegisterKind.VARIABLE and register.id not in self._owner
        owner = self._owner.setdefault(register.id, actor.id)
        if is_kept and self._plan.variables[self._variable_of(view)].role == PACKED:
            return  # of this launch alone, from firing to firing
        if register.kind is not RegisterKind.TEMPORARY or owner != actor.id:
            raise self._error(
                actor, index, f"has its workspace in {self._named(view)}, which is not its own"
            )
        self._held[self._places.of_view[view]] = NOTHING

    # -- after all chains --

    def _check_tokens(self) -> None:
        """Compare what consumers read with what the producer's firing leaves in a slot."""
        for actor, index, view, place, version in self._received:
            # Who reads the update runs after the updater; all other consumers run before it.
            updater, updated = self._updated.get(place, (actor, NOTHING))
            is_after = version == updated and updater != actor
            if not self._holds(place, version) and not is_after:
                raise self._stale(self._plan.actors[actor], index, view, version)
            if updater != actor:
                when = ReadTime.AFTER if is_after else ReadTime.BEFORE
                register = self._plan.views[view].register
                self._carried.append(LoopCarriedRead(actor, index, updater, register, when))
        for item in self._plan.fields:
            place = self._places.of_view[item.view]
            if place == NO_BYTES:
                continue
            is_found = place != NOWHERE and self._holds(place, item.version)
            if not is_found or place in self._updated:
                owner = self._owner.get(item.register)
                name = "nothing" if owner is None else self._plan.actors[owner].name
                actual = NOTHING if place == NOWHERE else self._held_not(place, item.version)
                raise InternalError(
                    f"{name} never writes field {item.name!r} ({self._plan.sources[item.source]}):"
                    f" it is to be {self._makers.version(item.version)}, and is"
                    f" {self._makers.version(actual)}"
                )

    def _check_written(self) -> None:
        for index, variable in enumerate(self._plan.variables):
            is_written = variable.after != variable.before
            has_bytes = self._places.of_view[variable.view] != NO_BYTES
            if is_written and has_bytes and index not in self._writer:
                raise InternalError(
                    f"variable {variable.name!r} is to end a step with"
                    f" {self._makers.version(variable.after)}, and nothing writes it there"
                )

    def _carry_variables(self) -> None:
        plan = self._plan
        for actor, index, variable, when in self._of_variables:
            writer = self._writer.get(variable, actor)
            view = plan.variables[variable].view
            if writer != actor:
                register = plan.views[view].register
                self._carried.append(LoopCarriedRead(actor, index, writer, register, when))
            # The read found nothing written by its own chain so far, so the variable is as it was
            # before.
            elif when is not ReadTime.BEFORE:
                raise self._error(
                    plan.actors[actor],
                    index,
                    f"reads {self._named(view)} {when.value} writes that follow in its own chain",
                )

    def _stale(self, actor: Actor, index: int, view: int, version: int) -> InternalError:
        words, actual = self._makers, self._held_not(self._places.of_view[view], version)
        return self._error(
            actor,
            index,
            f"reads {self._named(view)} for {words.version(version)}, and it holds"
            f" {words.version(actual)}",
        )
