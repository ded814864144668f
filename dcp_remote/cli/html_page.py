"""HTML page with tables and plots: one file without scripts, which loads nothing from elsewhere.

Functions take plain text, which may come from an attacker, and return markup, in which the text is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NewType

from dcp_remote.common.text import escape_unprintable
from dcp_remote.storage.cloud.redaction import redact

Markup = NewType("Markup", str)

# Side of the square of a plot's coordinates, which the browser stretches to the width of the window.
_SPAN = 1000

# Larger numbers are left out of plots, since the arithmetic of an axis could overflow.
_DRAWN_MAX = 1e300

# Tables of more rows are folded, and so left out in print.
_ROWS_OPEN_MAX = 100

# Characters of a text that are looked at, since the pattern takes quadratic time, and texts of a manifest may be long.
_READ_MAX = 4_000

_QUERY = re.compile(r"(\w://[^\s?#]*)[?#]\S*")

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2330; --soft: #5b6575; --rule: #d9dee6;
  --main: #1f6fc4; --left: #b8500a; --kept: #1b7f4b }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e7eaf0; --soft: #a3adbb;
  --rule: #333b47; --main: #6db1ff; --left: #ff9d57; --kept: #5fd39a } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 84rem; margin: auto; padding: 1rem; overflow-wrap: anywhere; display: grid; column-gap: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)) }
main > :not(figure) { grid-column: 1 / -1; min-width: 0 }
h1 { font-size: 1.35rem; margin: 0 } h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; break-after: avoid }
p, summary, th, figcaption, .plot { color: var(--soft); font-size: .85rem; margin: .3rem 0 }
figure { margin: 0 0 1rem; break-inside: avoid }
.plot { display: grid; grid-template-columns: max-content 1fr; gap: .6rem; padding: .6rem .4rem 0 0; line-height: 1 }
.plot svg { width: 100%; height: 13rem; overflow: visible }
.plot div { display: flex; justify-content: space-between; gap: 1rem; text-align: center }
.plot div:first-child { flex-direction: column; gap: 0; text-align: right; margin: -.5em 0 }
.plot div:last-child { grid-column: 2 }
path { fill: none; stroke: var(--main); stroke-width: 1.5; vector-effect: non-scaling-stroke }
.grid { stroke: var(--rule) } .link { stroke: var(--soft); stroke-dasharray: 4 4 }
.full, .thin, .left, .kept { stroke-width: 9; stroke-linecap: round } .left { stroke: var(--left) }
.kept { stroke: var(--kept); stroke-linecap: square }
.hole { stroke: var(--paper); stroke-width: 5; stroke-linecap: round }
.key { white-space: nowrap; margin-left: .8rem } .key svg { width: 1.2rem; height: .7rem; overflow: visible }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .15rem 1.1rem .15rem 0; border-bottom: 1px solid var(--rule) }
td { overflow-wrap: break-word } .number { text-align: right; white-space: nowrap } summary { break-after: avoid }
@media screen { th { overflow-wrap: break-word } td:not(.number, :empty, :first-child) { min-width: 8rem } }
@media print { :root, body { font-size: 9px } tr { break-inside: avoid } .scroll { overflow: visible } }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a plot: "line" and "link" connect them, the other kinds are dots. The legend names it by its label."""

    kind: Literal["line", "link", "full", "thin", "left", "kept"]
    points: Sequence[tuple[float, float]]  # horizontal and vertical value
    label: str = ""


def escape(text: str, characters_max: int = 60) -> Markup:
    """Return a text as markup: one line, cut, without user info, queries and signatures of URLs."""
    if len(text) > _READ_MAX:  # without the last word, which may be a URL whose password is not recognized if it is cut
        text = f"{text[:_READ_MAX].rpartition(' ')[0]}…"
    shown = redact(_QUERY.sub(r"\1?…", escape_unprintable(text)), ())
    return Markup(html.escape(shown if len(shown) <= characters_max else f"{shown[:characters_max]}…"))


def make_page(title: str, parts: Iterable[Markup]) -> Markup:
    """Return the document. Its policy lets a browser run no script and load nothing, whatever the text is."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return Markup(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body><main>{element('h1', title)}{''.join(parts)}</main></body></html>\n"
    )


def element(tag: Literal["h1", "h2", "p"], text: str) -> Markup:
    """Return a heading or a paragraph."""
    return Markup(f"<{tag}>{escape(text, 1_000)}</{tag}>\n")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int, wide: int = 60) -> Markup:
    """Return a table, folded if it is long; `right` columns are flush right, cells have `wide` characters at most."""
    sides = [' class="number"' if column < right else "" for column in range(len(header))]
    head = "".join(f'<th scope="col"{side}>{escape(name)}</th>' for name, side in zip(header, sides, strict=True))
    body = ""
    for row in rows:
        texts = (escape(text, wide) for text in row)
        cells = (f"<td{side}>{text}</td>" for text, side in zip(texts, sides, strict=True))
        body += f"<tr>{''.join(cells)}</tr>\n"
    return Markup(
        f"<details{' open' if len(rows) <= _ROWS_OPEN_MAX else ''}><summary>Table: {escape(title)}</summary>"
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div></details>\n"
    )


def plot(
    title: str, series: Iterable[Series], *, form_x: Callable[[float], str], form_y: Callable[[float], str]
) -> Markup:
    """Return a plot, whose axes tell the least value, the middle and the largest one, and its legend."""
    drawn = [replace(one, points=[point for point in one.points if abs(point[1]) < _DRAWN_MAX]) for one in series]
    points = [point for one in drawn for point in one.points]
    if not points:
        return Markup("")
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))

    def place(point: tuple[float, float]) -> str:
        x, y = (point[0] - left) / ((right - left) or 1), (high - point[1]) / ((high - low) or 1)
        return f"{_SPAN * x:.0f} {_SPAN * y:.0f}"

    svg = f'<svg viewBox="0 0 {_SPAN} {_SPAN}" preserveAspectRatio="none"'
    paths = "".join(_draw(one.kind, [place(point) for point in one.points]) for one in drawn if one.points)
    keys = (
        f'<span class="key">{svg} aria-hidden="true">{_draw(one.kind, ["500 500"])}</svg> {escape(one.label)}</span> '
        for one in drawn
        if one.label and one.points
    )
    labels_x = (f"<span>{escape(form_x(x))}</span>" for x in sorted({left, (left + right) / 2, right}))
    labels_y = (f"<span>{escape(form_y(y))}</span>" for y in sorted({low, (low + high) / 2, high}, reverse=True))
    return Markup(
        f'<figure><figcaption>{escape(title)}{"".join(keys)}</figcaption><div class="plot"><div>{"".join(labels_y)}'
        f'</div>{svg} role="img" aria-label="{escape(title)}"><path class="grid" d="M0 0h{_SPAN}M0 {_SPAN / 2}h{_SPAN}'
        f'M0 {_SPAN}h{_SPAN}"/>{paths}</svg><div>{"".join(labels_x)}</div></div></figure>\n'
    )


def _draw(kind: str, places: Sequence[str]) -> str:
    if kind in ("line", "link"):
        return f'<path class="{kind}" d="M{" ".join(places)}"/>'
    # Each dot is a line without a length, whose ends are not stretched with the plot.
    dots = "".join(f"M{place}h0" for place in places)
    return "".join(f'<path class="{name}" d="{dots}"/>' for name in [kind, *["hole"] * (kind in ("thin", "left"))])
