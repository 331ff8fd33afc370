"""Who makes each version of a plan, and how an error names launch, version and register."""

from __future__ import annotations

from compiler.errors import InternalError
from compiler.plan import Actor, Plan

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
        """Note who makes a version. Raises InternalError where another one does too."""
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
