"""Labels beside the points of a chart, each in the nearest place that is free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_DISTANCES = (4.0, 9.0, 15.0)
_ANGLES = (-90, -45, -135, 0, 180, 45, 135, 90)
"""Above first, then to the sides, then below: y grows downwards."""


def settled(
    points: Sequence[Point], sizes: Sequence[tuple[float, float]], radii: Sequence[float], frame: Box
) -> list[Point | None]:
    """The middle of each label, within the frame and clear of points and other labels; None where there is no room."""
    taken = [(x - r, y - r, x + r, y + r) for (x, y), r in zip(points, radii, strict=True)]
    places: list[Point | None] = []
    for point, size, radius in zip(points, sizes, radii, strict=True):
        free = (place for place in _around(point, size, radius) if _fits(_box(place, size), frame, taken))
        place = next(free, None)
        places.append(place)
        if place is not None:
            taken.append(_box(place, size))
    return places


def _around(point: Point, size: tuple[float, float], radius: float) -> Iterator[Point]:
    width, height = size
    for distance in _DISTANCES:
        for angle in _ANGLES:
            across, down = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            yield (
                point[0] + across * (radius + distance + width / 2),
                point[1] + down * (radius + distance + height / 2),
            )


def _box(place: Point, size: tuple[float, float]) -> Box:
    (x, y), (width, height) = place, size
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _fits(box: Box, frame: Box, taken: Sequence[Box]) -> bool:
    inside = frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
    return inside and not any(_overlap(box, other) for other in taken)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
