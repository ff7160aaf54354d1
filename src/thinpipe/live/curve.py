"""A curve of bounded length: means of ever more steps, so that a page of a long run stays as light as that of a short
one."""

from collections.abc import Sequence

_Point = tuple[int, float, int]


class Curve:
    def __init__(self, most: int = 400) -> None:
        self._most, self._each = most, 1
        self._points: list[_Point] = []
        """The last step, the mean, and of how many."""

    def add(self, step: int, value: float) -> None:
        """Steps that are computed again replace what was drawn of them."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        if self._points and self._points[-1][2] < self._each:
            self._points.append(_mean([self._points.pop(), (step, value, 1)]))
        else:
            self._points.append((step, value, 1))
        if len(self._points) > self._most:
            self._each *= 2
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value, _ in self._points]


def _mean(points: Sequence[_Point]) -> _Point:
    count = sum(number for _, _, number in points)
    return points[-1][0], sum(value * number for _, value, number in points) / count, count
