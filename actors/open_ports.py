"""The host's ports of a run, until each of them is closed: once, whoever comes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from actors.protocol import HostPort
from compiler.plan import PORTED, ActorKind, Plan


class OpenPorts:
    """The ports of one run. Methods may be called from any thread.

    `sources` and `ported` (sources and sinks) are actors of the plan.
    """

    def __init__(self, plan: Plan, ports: Mapping[str, HostPort]) -> None:
        self._names = {int(a.id): a.name for a in plan.actors if a.kind in PORTED}
        self._open = dict(ports)
        self.ported = frozenset(self._names)
        self.sources = frozenset([int(a.id) for a in plan.actors if a.kind is ActorKind.SOURCE])

    def close(self) -> tuple[BaseException, ...]:
        """Close all ports that are open; return what they raised."""
        return self._close(list(self._open))

    def close_sources(self) -> tuple[BaseException, ...]:
        """Close the sources that are open; return what they raised."""
        return self._close([self._names[source] for source in sorted(self.sources)])

    def sources_of(self, actors: Iterable[int]) -> tuple[str, ...]:
        """Return the names of those of some actors that are sources."""
        return tuple([self._names[actor] for actor in actors if actor in self.sources])

    def _close(self, names: Iterable[str]) -> tuple[BaseException, ...]:
        errors = []
        for name in names:
            port = self._open.pop(name, None)  # atomic: two threads may come at once
            try:
                if port is not None:
                    port.close()
            except BaseException as error:
                errors.append(error)
        return tuple(errors)
