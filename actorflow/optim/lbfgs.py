"""L-BFGS on the host, over losses and gradients that a job computes.

A step of it evaluates one batch as often as its line search asks, which depends on what came. So it
is no part of a plan, whose steps are alike: the host decides, and a job computes.

Source: Nocedal & Wright, Numerical Optimization, 2006: algorithm 7.4 (two loops) and, for the line
search, 3.5 and 3.6. Arguments and the order of the tests are those of torch.optim.LBFGS.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from actorflow.optim.schedules import not_negative
from actorflow.tensor.literals import checked_size
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError

Vector = np.ndarray[Any, Any]

_DECREASE, _CURVATURE = 1e-4, 0.9
"""The constants c1 and c2 of the strong Wolfe conditions."""

_MOST_TRIALS = 25
"""Evaluations of one line search."""


class Model(Protocol):
    """What L-BFGS asks of an `nn.Module`."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Yield (path, parameter)."""

    def state(self) -> Mapping[str, Vector]:
        """Return the values by path."""


class LBFGS:
    """Limited-memory BFGS. `step` needs a function that returns the loss and the gradients.

        minimiser = af.optim.LBFGS(model, line_search_fn="strong_wolfe")

        @af.job(train=False)
        def evaluate(model, batch):
            loss = af.mse_loss(model(batch.x), batch.y)
            return {"loss": loss, **af.grad(loss, model)}

        for _ in range(5):
            loss = minimiser.step(lambda: evaluate.step(model, batch))

    As in torch the function is called several times a step, on the same batch. Unlike there it
    returns the gradients too, by the paths of all parameters that are not frozen; and as the job
    does not train, dropout and batch norm do nothing else than in an evaluation. The host computes
    in float64; values of parameters are rounded to their dtype. The history is not part of a
    checkpoint: a new object begins with the direction of the gradient.

    Args:
        model: whose parameters are changed; those that are frozen stay.
        lr: the length of a step; with a line search where that begins.
        max_iter: directions in one `step`.
        max_eval: evaluations in one `step`; 1.25 max_iter by default.
        tolerance_grad: it ends where no element of the gradient is larger.
        tolerance_change: or where neither a parameter nor the loss changes by more.
        history_size: pairs of changes that are kept.
        line_search_fn: None, or "strong_wolfe".

    Raises CompileError with the user's line.
    """

    def __init__(
        self,
        model: Model,
        lr: float = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
    ) -> None:
        if line_search_fn not in (None, "strong_wolfe"):
            raise CompileError(
                f"{find_source()}: line_search_fn must be None or 'strong_wolfe', got"
                f" {line_search_fn!r}"
            )
        self._model = model
        self._lr = not_negative(lr, "lr")
        self._max_iter = _count(max_iter, "max_iter")
        most = self._max_iter * 5 // 4 if max_eval is None else max_eval
        self._max_eval = _count(most, "max_eval")
        self._least_slope = not_negative(tolerance_grad, "tolerance_grad")
        self._least_change = not_negative(tolerance_change, "tolerance_change")
        self._has_search = line_search_fn is not None
        self._pairs: deque[tuple[Vector, Vector]] = deque(maxlen=_count(history_size, "history"))
        self._direction: Vector | None = None
        self._length = 0.0
        self._gradient = np.zeros(0)

    def step(self, closure: Callable[[], Mapping[str, Any]]) -> float:
        """Change the parameters by up to `max_iter` steps; return the loss before them.

        `closure` returns "loss", and the gradient of each parameter by its path.
        """
        parameters = {p: x for p, x in self._model.named_parameters() if not x.is_frozen}
        arrays = self._model.state()
        x = np.concatenate([arrays[path].reshape(-1) for path in parameters], dtype=np.float64)

        def evaluate(at: Vector | None) -> tuple[float, Vector]:
            if at is not None:
                _write(parameters, at)
            return _read(closure(), parameters)

        loss, gradient = evaluate(None)
        first, evaluations = loss, 1
        for turn in range(1, self._max_iter + 1):
            if np.abs(gradient).max(initial=0.0) <= self._least_slope:
                break
            direction, length = self._next(gradient)
            slope = float(gradient @ direction)
            if slope > -self._least_change:
                break
            before, is_last = loss, turn == self._max_iter
            if self._has_search:
                search = _LineSearch(lambda t, x=x, d=direction: evaluate(x + t * d), direction)  # type: ignore[misc]  # the defaults are of this turn
                length, loss, gradient = search.run(length, loss, gradient)
                evaluations += search.count
                _write(parameters, x + length * direction)
            elif is_last:  # the next step evaluates there first
                _write(parameters, x + length * direction)
            else:
                loss, gradient = evaluate(x + length * direction)
                evaluations += 1
            x, self._length = x + length * direction, length
            change = float(np.abs(direction * length).max())
            is_converged = change <= self._least_change or abs(loss - before) < self._least_change
            if is_last or evaluations >= self._max_eval or is_converged:
                break
        return first

    def _next(self, gradient: Vector) -> tuple[Vector, float]:
        """Return the direction at a gradient, and how far along it the next step begins."""
        if self._direction is None:
            direction = -gradient
            length = min(1.0, 1.0 / float(np.abs(gradient).sum())) * self._lr
        else:
            y, s = gradient - self._gradient, self._direction * self._length
            if y @ s > 1e-10:  # or the inverse would not be positive
                self._pairs.append((s, y))
            direction, length = self._two_loops(-gradient), self._lr
        self._direction, self._gradient = direction, gradient
        return direction, length

    def _two_loops(self, q: Vector) -> Vector:
        """Return the product of the inverse Hessian's estimate and a vector."""
        shares = []
        for s, y in reversed(self._pairs):
            shares.append((s @ q) / (y @ s))
            q = q - shares[-1] * y
        if self._pairs:
            s, y = self._pairs[-1]
            q = q * ((y @ s) / (y @ y))
        for (s, y), share in zip(self._pairs, reversed(shares), strict=True):
            q = q + s * (share - (y @ q) / (y @ s))
        return q


class _LineSearch:
    """A line search for the strong Wolfe conditions; `count` are the evaluations so far."""

    def __init__(self, evaluate: Callable[[float], tuple[float, Vector]], along: Vector) -> None:
        self._evaluate, self._along = evaluate, along
        self.count = 0

    def _at(self, length: float) -> _Point:
        self.count += 1
        loss, gradient = self._evaluate(length)
        return _Point(length, loss, gradient, float(gradient @ self._along))

    def run(self, length: float, loss: float, gradient: Vector) -> tuple[float, float, Vector]:
        """Return a length that fulfils the conditions, or the best that was tried."""
        start = _Point(0.0, loss, gradient, float(gradient @ self._along))
        last, point = start, self._at(length)
        best = start
        while self.count < _MOST_TRIALS:
            best = min(best, point, key=lambda p: p.loss)
            if self._is_too_far(start, point) or (last is not start and point.loss >= last.loss):
                return self._zoom(start, last, point).result
            if abs(point.slope) <= -_CURVATURE * start.slope:
                return point.result
            if point.slope >= 0.0:
                return self._zoom(start, point, last).result
            low, high = point.length + 0.01 * (point.length - last.length), point.length * 10.0
            last, point = point, self._at(_cubic(last, point, low, high))
        return min(best, point, key=lambda p: p.loss).result

    def _is_too_far(self, start: _Point, point: _Point) -> bool:
        """Whether the loss at a point has not fallen as its first slope promises."""
        return not point.loss <= start.loss + _DECREASE * point.length * start.slope

    def _zoom(self, start: _Point, low: _Point, high: _Point) -> _Point:
        """Narrow an interval whose end `low` has the least loss so far that fell enough."""
        while self.count < _MOST_TRIALS and high.length != low.length:
            begin, end = sorted((low.length, high.length))
            margin = 0.1 * (end - begin)
            point = self._at(_cubic(low, high, begin + margin, end - margin))
            if self._is_too_far(start, point) or point.loss >= low.loss:
                high = point
                continue
            if abs(point.slope) <= -_CURVATURE * start.slope:
                return point
            if point.slope * (high.length - low.length) >= 0.0:
                high = low
            low = point
        return low


class _Point:
    """What is known of one length of a line search."""

    def __init__(self, length: float, loss: float, gradient: Vector, slope: float) -> None:
        self.length, self.loss, self.slope = length, loss, slope
        self.result = length, loss, gradient


def _cubic(one: _Point, other: _Point, low: float, high: float) -> float:
    """Return where the cubic through two points is least in [low, high], else the middle (3.59)."""
    span = other.length - one.length
    d1 = one.slope + other.slope - 3.0 * (other.loss - one.loss) / span
    square = d1 * d1 - one.slope * other.slope
    if not 0.0 <= square < math.inf:
        return (low + high) / 2.0
    d2 = math.copysign(math.sqrt(square), span)
    below = other.slope - one.slope + 2.0 * d2
    if below == 0.0:
        return (low + high) / 2.0
    return min(max(other.length - span * (other.slope + d2 - d1) / below, low), high)


def _write(parameters: Mapping[str, Any], values: Vector) -> None:
    begin = 0
    for parameter in parameters.values():
        size = parameter.type.num_elements
        parameter.data = values[begin : begin + size].reshape(parameter.shape)
        begin += size


def _read(returned: Any, parameters: Mapping[str, Any]) -> tuple[float, Vector]:
    """Return the loss and the gradients as one vector. Raises CompileError for anything else."""
    expected = ["loss", *parameters]
    missing = (
        [name for name in expected if name not in returned] if isinstance(returned, Mapping) else []
    )
    if missing or not isinstance(returned, Mapping):
        came = f"nothing of {missing[0]!r}" if missing else type(returned).__name__
        raise CompileError(
            f"{find_source()}: the function of LBFGS.step must return a dict of the loss and the"
            f" gradients by path, {{'loss': loss, **af.grad(loss, model)}}; got {came}"
        )
    gradients = [np.asarray(returned[path], np.float64).reshape(-1) for path in parameters]
    return float(returned["loss"]), np.concatenate(gradients)


def _count(number: int, what: str) -> int:
    count = checked_size(number, what)
    if count < 1:
        raise CompileError(f"{find_source()}: {what} must be 1 or more, got {count}")
    return count
