"""Labels beside the points of a plot, moved until none covers another label or a point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

_DISTANCES = (11.0, 17.0, 26.0, 36.0, 48.0, 64.0)
"""How far from its point a label may be, in printer's points; the nearest that is free is taken."""
_ANGLES = (90, 45, 135, 0, 180, -45, -135, -90, 67, 113, 22, 158)
_FAR = 22.0
"""From here on a line shows which point a label belongs to."""
_POINT_SIZE, _RING_SIZE = 9.0, 17.0
_LOOK: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "zorder": 5}


def place_labels(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    texts: Sequence[str],
    ringed: Sequence[bool],
    *,
    colour: str,
    line: str,
) -> None:
    """Write a text beside each point, where there is room for it; a point that is ringed needs more."""
    from matplotlib.patheffects import withStroke

    figure: Any = axes.figure
    figure.canvas.draw()  # a layout that adapts itself is only settled by drawing
    renderer = figure.canvas.get_renderer()
    sizes = [_RING_SIZE if ring else _POINT_SIZE for ring in ringed]
    taken = [_around(axes, x, y, size * figure.dpi / 72) for x, y, size in zip(xs, ys, sizes, strict=True)]
    if (legend := axes.get_legend()) is not None:
        taken.append(legend.get_window_extent(renderer))
    frame = axes.get_window_extent(renderer)
    for x, y, text in zip(xs, ys, texts, strict=True):
        label = axes.annotate(text, (x, y), (0, 0), **_LOOK, color=colour)
        taken.append(_settle(label, frame, taken, renderer))
        offset = label.get_position()
        if math.hypot(*offset) > _FAR:
            leader = {"arrowstyle": "-", "color": line, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
            axes.annotate("", (x, y), offset, **{**_LOOK, "zorder": 2}, arrowprops=leader).set_in_layout(False)
        label.set_in_layout(False)
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # legible where a line runs under it


def _settle(label: Annotation, frame: Bbox, taken: Sequence[Bbox], renderer: Any) -> Bbox:
    """Move a label to the first place that is free, or to the last there is; the box that it takes there."""
    box = label.get_window_extent(renderer)
    for place in _places():
        label.set_position(place)
        box = label.get_window_extent(renderer)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            break
    return box


def _places() -> Iterator[tuple[float, float]]:
    for distance in _DISTANCES:
        for angle in _ANGLES:
            # Texts are wider than high: a little more room to the sides.
            yield distance * 1.25 * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))


def _around(axes: Axes, x: float, y: float, size: float) -> Bbox:
    from matplotlib.transforms import Bbox

    centre_x, centre_y = axes.transData.transform((x, y))
    half = size / 2
    return Bbox.from_extents(centre_x - half, centre_y - half, centre_x + half, centre_y + half)
