"""A report of sections with text, figures and tables, as one HTML file.

It requests nothing: a policy in it forbids every request and every script but its own.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_toolkit.report.figures import RULES, STYLE, Figure, escaped
from hpc_toolkit.system.quantities import format_duration


class Cell(NamedTuple):
    """A cell that is sorted by a number."""

    text: str
    value: float
    share: float = 0.0
    """Length of a bar behind the text, from 0 to 1."""


Row = tuple["str | Cell", ...]
_LONG_ROWS = 25
"""A table with more rows scrolls inside of the page."""
_LONG = 40
"""A longer text gets a wide column on a narrow screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under headings."""

    title: str
    columns: tuple[str, ...]
    """No names: the table has no headings, and cannot be sorted."""
    rows: Sequence[Row]
    note: str = ""
    fits: bool = False
    """Whether texts are broken so that a phone shows all columns, if the numbers are short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page; its figures come before its tables."""

    title: str
    paragraphs: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values that stand out."""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def count(value: int, most: float = 0) -> Cell:
    """A whole number; with ``most`` a bar shows its share of it."""
    return Cell(f"{value:,}", value, value / most if most else 0.0)


def seconds(value: float | None, most: float = 0) -> str | Cell:
    """A duration; with ``most`` a bar shows its share of it."""
    if value is None:
        return "unknown"
    return Cell(format_duration(value), value, value / most if most else 0.0)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """Return one self-contained file: light and dark, for screens, phones and paper."""
    allowed = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none';style-src 'unsafe-inline';script-src 'sha256-{allowed}'"
    policy += ";base-uri 'none';form-action 'none'"
    links = "".join(
        f'<a href="#s{number}">{escaped(section.title)}</a>'
        for number, section in enumerate(sections)
    )
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escaped(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>",
        f"<header><h1>{escaped(title)}</h1>\n<nav>{links}</nav></header>\n<main>",
        *(line for number, section in enumerate(sections) for line in _section(number, section)),
        f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>",
    ]
    return "\n".join(lines) + "\n"


def _section(number: int, section: Section) -> Iterator[str]:
    yield f'<section id="s{number}">\n<h2>{escaped(section.title)}</h2>'
    yield from (f"<p>{escaped(text)}</p>" for text in section.paragraphs)
    if section.facts:
        facts = (
            f"<div><dt>{escaped(name)}</dt><dd>{escaped(said)}</dd></div>"
            for name, said in section.facts
        )
        yield f"<dl>{''.join(facts)}</dl>"
    for figure in section.figures:
        svg = figure.svg.replace(STYLE, "")
        caption = f"<figcaption>{escaped(figure.caption)}</figcaption>" if figure.caption else ""
        yield f'<figure><div class="scroll">{svg}</div>{caption}</figure>'
    for table in section.tables:
        yield from _table(table)
    yield "</section>"


def _table(table: Table) -> list[str]:
    has_head = any(table.columns)
    kind = "" if has_head else ' class="plain"'
    kind = ' class="fits"' if table.fits else kind
    frame = "scroll long" if len(table.rows) > _LONG_ROWS else "scroll"
    lines = [f"<h3>{escaped(table.title)}</h3>"] if table.title else []
    lines.append(f'<div class="{frame}" tabindex="0"><table{kind}>')
    if has_head:
        heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in table.columns)
        lines.append(f"<thead><tr>{heads}</tr></thead>")
    lines.append("<tbody>")
    lines += (f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    lines.append("</tbody></table></div>")
    lines += [f'<p class="note">{escaped(table.note)}</p>'] if table.note else []
    return lines


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        kind = ' class="w"' if len(cell) > _LONG else ""
        return f"<td{kind}>{escaped(cell)}</td>"
    bar = f' style="--share:{100 * min(cell.share, 1):.1f}%"' if cell.share > 0 else ""
    kind = "n b" if bar else "n"
    return f'<td class="{kind}" data-v="{cell.value:.9g}"{bar}>{escaped(cell.text)}</td>'


CSS = (
    RULES
    + """
:root{--ink:#1f2328;--dim:#59636e;--line:#d8dee4;--paper:#fff;--card:#f6f8fa;--bar:#0072b22e;
--link:#0060a8}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9ba7b4;--line:#343b44;
--paper:#15181d;--card:#1d2229;--bar:#2b8fd050;--link:#7cc4ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:.94rem/1.5 system-ui,sans-serif}
header,main{max-width:62rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.25rem}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.3rem 0 .4rem}
p{margin:.5rem 0;max-width:48rem;overflow-wrap:anywhere}
a{color:var(--link)}
nav{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin-top:.5rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.2rem,1fr));gap:.6rem;margin:1rem 0}
dl div{background:var(--card);border-radius:6px;padding:.5rem .75rem}
dt{color:var(--dim);font-size:.85rem}
dd{margin:0;font-size:1.05rem;font-weight:600;overflow-wrap:anywhere}
figure{margin:1rem 0;break-inside:avoid}
figcaption,.note{color:var(--dim);font-size:.87rem;max-width:48rem}
.scroll{overflow-x:auto}
.long{max-height:min(36rem,75vh);overflow:auto}
.long th{position:sticky;top:0;background:var(--paper)}
.scroll svg{display:block;width:100%}
.scroll svg[viewBox]{height:auto;min-width:40rem}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem .25rem 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--line)}
td{max-width:34rem;min-width:3rem;white-space:nowrap}
td.w,.plain td{white-space:normal;overflow-wrap:anywhere}
th{white-space:nowrap;color:var(--dim);font-weight:600}
td.w{min-width:9rem}
@media(max-width:40rem){td.w{min-width:16rem}}
.plain td:first-child{white-space:nowrap}
td.b{min-width:8rem}
td.n{text-align:right;white-space:nowrap;padding-left:.7rem;
background:linear-gradient(90deg,var(--bar) var(--share,0%),transparent 0)}
th button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer}
th button::after{content:" \\2195";opacity:.5}
th[aria-sort=ascending] button::after{content:" \\2191";opacity:1}
th[aria-sort=descending] button::after{content:" \\2193";opacity:1}
@media(max-width:40rem){th,td,td.n{padding:.25rem .4rem .25rem 0}
.fits{font-size:.8rem}.fits td:not(.n){white-space:normal;overflow-wrap:anywhere;min-width:2.5rem}
.fits td.b{min-width:4.5rem}
th button::after{display:none}}
@media print{nav,th button::after{display:none}html{font-size:11px}h2,h3{break-after:avoid}
header,main{max-width:none;padding:0}th{white-space:normal}td,td.w,td.b{min-width:0}td{white-space:normal;overflow-wrap:anywhere}
.scroll{overflow:visible}.long{max-height:none}.scroll svg[viewBox]{min-width:0}
tr{break-inside:avoid}a{color:inherit}
td.n,dl div{print-color-adjust:exact}}
"""
)
"""Light, dark and print; tables and figures scroll where a screen is narrow."""

SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  if (!table.tHead) continue;
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "descending";
      heads.forEach(one => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const order = new Intl.Collator(undefined, {numeric: true}).compare;
      const compare = (a, b) => isNaN(a) || isNaN(b) ? order(a, b) : a - b;
      body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b)) * (down ? 1 : -1)));
    });
  });
}
"""
"""Sorts a table by the column whose heading is clicked; without it, the tables are as written."""
