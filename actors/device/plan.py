"""A bound plan whose actors on a device are enqueued there: what a loop runs instead of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from actors.device.executor import Executor
from actors.device.protocol import DeviceDriver
from actors.load import BoundPlan, VariableMemory
from actors.protocol import Chain, HostPort
from actors.table import MachineTable
from compiler.errors import ActorflowError, InternalError
from compiler.placement import HOST
from compiler.plan import PORTED, Plan

_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


class DevicePlan:
    """A bound plan, driven through an executor; has what a loop needs of a bound plan.

    The plan's streams say what is where: all that are not on the host must be on one device.

    Args:
        bound: What to run; its memory must be memory that launches and ports can both reach.
        device: The device of the plan's streams.
        max_ahead: Steps that may be enqueued and not ended.
        initial: Tokens ready at the start, as in the loop that will run this.

    Raises:
        InternalError: The plan has streams on several devices, or a source or sink on one.
    """

    __slots__ = ("_bound", "chains", "executor", "plan", "ports")

    def __init__(
        self,
        bound: BoundPlan,
        device: DeviceDriver,
        *,
        max_ahead: int = 2,
        initial: Mapping[str, int] = _NO_TOKENS,
    ) -> None:
        _check_placement(bound.plan)
        self.plan: Plan = bound.plan
        self.ports: Mapping[str, HostPort] = bound.ports
        self.executor = Executor(
            MachineTable.of(bound.plan, initial),
            {s.id: s.name for s in bound.plan.streams if s.device.kind != HOST.kind},
            device,
            max_ahead=max_ahead,
        )
        self.chains: tuple[tuple[Chain, ...], ...] = tuple(
            [self.executor.bind(actor, phases) for actor, phases in enumerate(bound.chains)]
        )
        self._bound = bound

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas."""
        return self._bound.arena_bytes

    @property
    def variables(self) -> VariableMemory:
        """The variables by name; whole only after `synchronize`."""
        return self._bound.variables

    def bind_flush(self, actor: int, firing: int, num_tokens_per_input: tuple[int, ...]) -> Chain:
        """Return what the last firing of a flushed actor runs, with fewer tokens on its inputs."""
        chain = self._bound.bind_flush(actor, firing, num_tokens_per_input)
        return self.executor.bind_flush(actor, num_tokens_per_input, chain)

    def synchronize(self) -> None:
        """Wait until the device has done all that the run enqueued: see `Executor.synchronize`."""
        self.executor.synchronize()

    def restart(self) -> None:
        """Wait for the device, and be ready for another run."""
        self.executor.restart()

    def release(self) -> None:
        """Wait for the device and drop launches and memory. Idempotent; raises nothing.

        A device that has failed executes nothing more, so its memory can go.
        """
        if self.chains:
            with suppress(ActorflowError):
                self.executor.synchronize()
            self.chains = ()
            self._bound.release()


def _check_placement(plan: Plan) -> None:
    devices = sorted({str(s.device) for s in plan.streams if s.device.kind != HOST.kind})
    if len(devices) > 1:
        raise InternalError(
            f"plan {plan.name!r} has streams on {', '.join(devices)}; a run drives one device"
        )
    for actor in plan.actors:
        stream = plan.streams[actor.stream]
        if actor.kind in PORTED and stream.device.kind != HOST.kind:
            raise InternalError(
                f"{actor.kind.value} {actor.name!r} is on stream {stream.name!r} of"
                f" {stream.device}; a port runs on the host, and a copy actor brings its data over"
            )
