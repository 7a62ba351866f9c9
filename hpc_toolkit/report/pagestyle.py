"""The style and the script of a page; both are inside of it."""

from __future__ import annotations

from hpc_toolkit.report.figures import RULES

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
ul{margin:.8rem 0;padding-left:1.2rem;max-width:54rem}
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
