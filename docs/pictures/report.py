"""Take a picture of the search's charts in a report: ``report.py REPORT.html``; needs chromium."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1000, 700
# Only the first figure of the sections "Outcome" and "Rewards".
STYLE = """<style>
header, h2, h3, p, dl, ul, figcaption, section, section > * {display: none !important}
#s0, #s1, #s0 > figure:first-of-type, #s1 > figure:first-of-type {display: block !important}
</style>"""

with tempfile.TemporaryDirectory() as folder:
    page = Path(folder, "report.html")
    page.write_text(Path(sys.argv[1]).read_text().replace("</head>", f"{STYLE}</head>"))
    target = HERE / "report.png"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = f"--window-size={WIDTH},{HEIGHT}"
    subprocess.run(
        ["chromium", *options, size, f"--screenshot={target}", page.as_uri()],
        check=True,
        capture_output=True,
    )
print(target)
