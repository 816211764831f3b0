"""A figure as SVG, and the few shapes that figures are made of.

Colours are classes and CSS variables of `figure.css`, so that one drawing serves light and dark,
inside the page and as a file of its own.  Every text of a user goes through `escape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

PAGE_WIDTH = 1120
"""Width of every figure in user units; the page scales it."""

_CHARACTER_PART = 0.56
"""Mean width of a character of a sans-serif face, in font sizes."""


@dataclass(frozen=True)
class Figure:
    """`body` is SVG without its root element; `alt` says in words what the figure shows."""

    name: str
    alt: str
    height: float
    body: str
    width: float = PAGE_WIDTH

    def inline(self) -> str:
        """Return the element for the page, where the styles already stand."""
        return (
            f'<svg class="figure" id="figure-{self.name}" viewBox="0 0 {number(self.width)} '
            f'{number(self.height)}" role="img" aria-label="{escape(self.alt)}">{self.body}</svg>'
        )

    def standalone(self) -> str:
        """Return the figure as a separate file, with the styles inside."""
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" width="{number(self.width)}" '
            f'height="{number(self.height)}" viewBox="0 0 {number(self.width)} '
            f'{number(self.height)}" role="img" aria-label="{escape(self.alt)}">'
            f"<style>{style()}</style>"
            f'<rect class="page" width="100%" height="100%"/>{self.body}</svg>\n'
        )


@cache
def style() -> str:
    """Return the style sheet of figures."""
    return asset("figure.css")


def asset(name: str) -> str:
    """Read a text file beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def number(value: float) -> str:
    """Write a coordinate with a tenth of a unit, without zeros that say nothing."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def rect(
    x: float, y: float, width: float, height: float, kind: str, *, title: str = "", rx: float = 0.0
) -> str:
    """Draw a rectangle of the class `kind`; `title` is shown under the pointer.

    Args:
        x, y, width, height: in user units.
        kind: class of the style sheet.
        title: shown under the pointer.
        rx: radius of the corners.
    """
    corner = f' rx="{number(rx)}"' if rx else ""
    shape = (
        f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.0))}" '
        f'height="{number(height)}"{corner}'
    )
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(x: float, y: float, words: str, kind: str = "label", *, anchor: str = "start") -> str:
    """Draw a line of text with its baseline at y; `anchor`: start, middle or end."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{number(x)}" y="{number(y)}"{where}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Draw a straight line."""
    return (
        f'<line class="{kind}" x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" '
        f'y2="{number(y2)}"/>'
    )


def fitted(words: str, width: float, font_size: float) -> str:
    """Cut `words` to a width; empty when not even three characters fit."""
    # Characters that fit; one place goes to the ellipsis.
    room = int(width / (font_size * _CHARACTER_PART))
    if len(words) <= room:
        return words
    return words[: room - 1].rstrip() + "…" if room >= 3 else ""


def text_width(words: str, font_size: float) -> float:
    """Estimate the width of a text."""
    return len(words) * font_size * _CHARACTER_PART


def legend(entries: tuple[tuple[str, str], ...], x: float, y: float) -> str:
    """Draw squares of a class with their words, in a row; y is the baseline."""
    parts = []
    for kind, words in entries:
        parts.append(rect(x, y - 10, 12, 12, kind, rx=2))
        parts.append(text(x + 18, y, words, "small"))
        x += 18 + text_width(words, 12) + 22
    return "".join(parts)


def ticks(limit: float, most: int = 8) -> list[float]:
    """Return round values from 0 to `limit`, at most about `most` of them; 0 alone where nothing
    lasts."""
    # No step divides nothing.
    if limit <= 0:
        return [0.0]
    # Steps of 1, 2, 5 and 10 times a power of ten.
    step = 10.0 ** _floor_log10(limit / most)
    while limit / step > most:
        for factor in (2.0, 2.5, 2.0):
            step *= factor
            if limit / step <= most:
                break
    # The last tick may be the limit itself, rounding apart.
    count = int(limit / step + 1e-9)
    return [i * step for i in range(count + 1)]


def _floor_log10(value: float) -> int:
    exponent = 0
    while value >= 10:
        value, exponent = value / 10, exponent + 1
    while value < 1:
        value, exponent = value * 10, exponent - 1
    return exponent
