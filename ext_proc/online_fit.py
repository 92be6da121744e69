"""Online linear regression that starts from a prior, forgets slowly and is not thrown by outliers.

Least squares over exponentially forgotten observations, drawn a little to what was believed before, at first
the prior. An observation far from the prediction is pulled in to a bounded distance (Huber). Weights are
fitted as multiples of their prior, which keeps quantities of very different size apart. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

FORGETTING = 0.995
"""Weight that an observation keeps with each later one: about the last 200 count."""
INERTIA_OBSERVATIONS = 2.0
"""How many observations of the first input alone the weights believed before are worth."""
OUTLIER_RATIO = 0.5
"""Observations further than this share from the prediction are pulled in to it."""
MOST_OUTLIERS = 4
"""So many outliers in a row on one side are believed, and what came before them is soon forgotten."""
AFTER_CHANGE = 0.7
"""Weight that earlier observations keep with each one then."""


class OnlineFit:
    """Fits y ≈ Σ weightᵢ × xᵢ with weightᵢ ≥ 0."""

    __slots__ = ("_moments", "_outliers_in_a_row", "_prior", "_ridge", "_targets", "weights")

    def __init__(self, prior: Sequence[float]) -> None:
        """Start at the weights `prior`, all positive; the first belongs to a constant input of 1."""
        if min(prior) <= 0:
            raise ValueError(f"weights must be positive, got {tuple(prior)}")
        size = len(prior)
        self._prior = tuple(prior)
        self._ridge = INERTIA_OBSERVATIONS * prior[0] * prior[0]
        self._moments = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._outliers_in_a_row = 0
        self.weights = list(prior)

    def predict(self, x: Sequence[float]) -> float:
        """The value expected at `x`."""
        return sum(w * v for w, v in zip(self.weights, x, strict=True))

    def observe(self, x: Sequence[float], y: float) -> None:
        """Take in that `y` was seen at `x`."""
        predicted = self.predict(x)
        y, kept = self._believed(predicted, y)
        scaled = [v * p for v, p in zip(x, self._prior, strict=True)]
        for row, s in zip(self._moments, scaled, strict=True):
            for j, t in enumerate(scaled):
                row[j] = kept * row[j] + s * t
        self._targets = [kept * b + s * y for b, s in zip(self._targets, scaled, strict=True)]
        self.weights = [max(0.0, m) * p for m, p in zip(self._multiples(), self._prior, strict=True)]

    def _believed(self, predicted: float, y: float) -> tuple[float, float]:
        """What to take for `y`, and the weight that earlier observations keep.

        One outlier is an error of measurement; several in a row on one side mean that the world has changed.
        """
        side = 1 if y > predicted else -1
        reach = OUTLIER_RATIO * predicted * 2 ** abs(self._outliers_in_a_row)
        if abs(y - predicted) <= OUTLIER_RATIO * predicted:
            self._outliers_in_a_row = 0
        elif self._outliers_in_a_row * side >= 0:
            self._outliers_in_a_row = side * min(MOST_OUTLIERS, abs(self._outliers_in_a_row) + 1)
        else:
            self._outliers_in_a_row = side
        changed = abs(self._outliers_in_a_row) >= MOST_OUTLIERS
        believed = max(predicted / 2 ** (1 + abs(self._outliers_in_a_row)), predicted - reach)
        return max(believed, min(predicted + reach, y)), AFTER_CHANGE if changed else FORGETTING

    def _multiples(self) -> list[float]:
        """Solve (moments + ridge) · m = targets + ridge · m before, which is positive definite."""
        size = len(self._prior)
        before = [w / p for w, p in zip(self.weights, self._prior, strict=True)]
        rows = [
            [*row, b + self._ridge * m]
            for row, b, m in zip(self._moments, self._targets, before, strict=True)
        ]
        for i in range(size):
            rows[i][i] += self._ridge
        for i in range(size):
            for k in range(i + 1, size):
                factor = rows[k][i] / rows[i][i]
                for j in range(i, size + 1):
                    rows[k][j] -= factor * rows[i][j]
        solution = [0.0] * size
        for i in reversed(range(size)):
            known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
            solution[i] = (rows[i][size] - known) / rows[i][i]
        return solution
