"""Small plots as inline SVG: scales with round ticks, axes with units, and marks that take their colours
from the page's CSS.

A `Plot` is drawn mark by mark; `svg()` returns it as well-formed XML without scripts, fonts or links. It
scales with the page, and its text is large enough for a phone. Values that cannot be placed (zero on a
logarithm) are moved to the edge and are never an error. One thread uses a plot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 506, 26, 266

Point = tuple[float, float]


def format_count(value: float) -> str:
    """Return a count as text for an axis: `850`, `12k`, `1.5M`."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def format_time(milliseconds: float) -> str:
    """Return a time as text for an axis: `50 ms`, `2 s`."""
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds:g} ms"


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear scale from `low` to `high`. Both scales map values to positions on an axis."""

    low: float
    high: float

    @classmethod
    def up_to(cls, values: Iterable[float]) -> Linear:
        """Make a scale from 0 to a little more than the largest value."""
        return cls(0, max(values, default=0) * 1.08 or 1)

    def position(self, value: float) -> float:
        """Return the position of a value: 0 at the start of the axis, 1 at its end."""
        return min(max((value - self.low) / (self.high - self.low), 0), 1)

    def ticks(self) -> list[float]:
        """Return the values that are labelled on the axis."""
        raw = (self.high - self.low) / 6
        power = 10 ** math.floor(math.log10(raw))
        spacing = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
        first, last = math.ceil(self.low / spacing - 1e-9), math.floor(self.high / spacing + 1e-9)
        return [index * spacing for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Log:
    """A logarithmic scale from `low` to `high`, both above 0."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float]) -> Log:
        """Make a scale that holds all positive values with a margin, at least half a decade."""
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive) / 1.3, max(positive) * 1.3
        return cls(low, max(high, low * 4))

    def position(self, value: float) -> float:
        if value <= self.low:
            return 0
        return min(math.log(value / self.low) / math.log(self.high / self.low), 1)

    def ticks(self) -> list[float]:
        decades = math.log10(self.high / self.low)
        densities = ((0.9, (1, 1.5, 2, 3, 5, 7)), (2.5, (1, 2, 5)), (4, (1, 3)), (math.inf, (1,)))
        factors = next(factors for most, factors in densities if decades < most)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (factor * 10.0**power for power in powers for factor in factors)
        return [value for value in values if self.low <= value <= self.high]


class Plot:
    """One figure. Marks take the class names of the page's CSS: `off`, `on`, `gpu`, `cpu`, `recomputed`."""

    def __init__(
        self, description: str, x: Linear | Log, y: Linear | Log, *, x_label: str, y_label: str
    ) -> None:
        self._description, self._x, self._y = description, x, y
        self._marks: list[str] = []
        self._axes: list[str] = []
        self.text((LEFT + RIGHT) / 2, HEIGHT - 8, x_label, "label", into=self._axes)
        self.text(0, 13, y_label, "label start", into=self._axes)

    # Values to pixels.

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return LEFT + self._x.position(value) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return BOTTOM - self._y.position(value) * (BOTTOM - TOP)

    # Axes.

    def y_axis(self, labels: Iterable[tuple[float, str]]) -> None:
        """Draw horizontal grid lines with their labels."""
        for value, label in labels:
            y = self.y(value)
            self._axes.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 7, y + 4.5, label, "tick end", into=self._axes)

    def x_axis(self, labels: Iterable[tuple[float, str]], *, grid: bool = False) -> None:
        """Draw ticks below the plot with their labels."""
        for value, label in labels:
            x, top = self.x(value), TOP if grid else BOTTOM
            self._axes.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{BOTTOM + 5}"/>')
            self.text(x, BOTTOM + 20, label, "tick", into=self._axes)

    # Marks. Arguments named px, py, left, top, width and height are in pixels, others are values.

    def text(self, px: float, py: float, text: str, css: str, *, into: list[str] | None = None) -> None:
        """Write text at a position in pixels."""
        target = self._marks if into is None else into
        target.append(f'<text class="{css}" x="{px:.1f}" y="{py:.1f}">{escape(text)}</text>')

    def rect_px(self, left: float, top: float, width: float, height: float, css: str, tip: str = "") -> None:
        """Draw a box at a position in pixels."""
        box = f'x="{left:.1f}" y="{top:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
        self._marks.append(f'<rect class="{css}" {box}>{_tip(tip)}</rect>')

    def band(self, start: float, end: float, css: str) -> None:
        """Shade a range of x values behind everything else."""
        left, right = self.x(start), self.x(end)
        box = f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{BOTTOM - TOP}"'
        self._axes.insert(0, f'<rect class="{css}" {box}/>')

    def line(self, points: Sequence[Point], css: str) -> None:
        """Draw a line through points."""
        if points:
            path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
            self._marks.append(f'<polyline class="line {css}" points="{path}"/>')

    def dot(self, point: Point, css: str, tip: str = "") -> None:
        """Draw a dot at a point."""
        x, y = self.x(point[0]), self.y(point[1])
        self._marks.append(
            f'<circle class="dot {css}" cx="{x:.1f}" cy="{y:.1f}" r="3.6">{_tip(tip)}</circle>'
        )

    def svg(self) -> str:
        """Return the figure."""
        frame = f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
        body = "\n".join([*self._axes, *self._marks, frame])
        opening = (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label={quoteattr(self._description)}>'
        )
        return f"{opening}\n{body}\n</svg>"


def _tip(text: str) -> str:
    """Return the tooltip of a mark, as a title element."""
    return f"<title>{escape(text)}</title>" if text else ""
