"""The page: one HTML file with the charts' JavaScript in it, which loads nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

import altair as alt
import vl_convert

from mpiparallel.report import look
from mpiparallel.report.picture import Picture

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
PNG_WIDTH, PNG_SCALE = 860, 2

STYLE = f"""
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f3f5f7; color: {look.INK}; font: 16px/1.5 {FONT}; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 20px 16px 48px; }}
h1 {{ font-size: 26px; line-height: 1.25; margin: 4px 0 16px; overflow-wrap: anywhere; }}
h2 {{ font-size: 19px; margin: 0 0 4px; }}
section, dl {{ background: {look.PAPER}; border: 1px solid #dde2e7; border-radius: 10px;
    padding: 18px 16px; margin: 0 0 16px; }}
section p {{ color: {look.FAINT}; font-size: 14px; margin: 0 0 14px; max-width: 90ch; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 14px; }}
dt {{ color: {look.FAINT}; font-size: 13px; }}
dd {{ margin: 0; font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; }}
code {{ background: #eef1f4; border-radius: 4px; padding: 1px 5px; color: {look.INK};
    overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
.chart {{ width: 100%; }}
table {{ border-collapse: collapse; font-size: 14px; margin-top: 14px;
    font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 4px 0 4px 20px; white-space: nowrap; }}
th {{ color: {look.FAINT}; font-weight: 600; border-bottom: 1px solid #c8d0d8; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
@media (max-width: 500px) {{ table {{ font-size: 11.5px; }} th, td {{ padding-left: 6px; }} }}
#vg-tooltip-element {{ font: 13px/1.4 {FONT}; }}
"""

# The policy makes a browser refuse whatever a page might load; the charts are compiled in place.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data:"
)

CONFIG = {
    "font": FONT,
    "background": look.PAPER,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelColor": look.INK,
        "titleColor": look.FAINT,
        "gridColor": "#e8ebee",
        "domainColor": "#b8c1cb",
        "tickColor": "#b8c1cb",
        "labelLimit": 220,
        "titlePadding": 10,
        "labelPadding": 6,
    },
    "axisXQuantitative": {"tickCount": {"expr": "ceil(width / 80)"}},
    "legend": {"labelFontSize": 12, "labelColor": look.INK, "symbolType": "square", "offset": 12},
    "text": {"font": FONT, "fontSize": 12},
    "title": {
        "fontSize": 17,
        "anchor": "start",
        "color": look.INK,
        "subtitleColor": look.FAINT,
        "subtitleFontSize": 12,
        "offset": 14,
    },
}


def page(title: str, facts: dict[str, str], pictures: Sequence[Picture]) -> str:
    """The whole HTML file. facts : what stands at its head, by name."""
    charts = {picture.name: _specification(picture) for picture in pictures if picture.chart}
    script = vl_convert.javascript_bundle(
        f"const charts = {json.dumps(charts)};\n"
        "for (const [name, chart] of Object.entries(charts))\n"
        '    vegaEmbed("#chart-" + name, chart,\n'
        '              { mode: "vega-lite", renderer: "svg", actions: false });\n',
        vl_version=_vega_lite(),
    ).replace("</script", "<\\/script")
    head = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    sections = "\n".join(_section(picture) for picture in pictures)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<dl>
{head}
</dl>
{sections}
</main>
<script>{script}</script>
</body>
</html>
"""


def png(picture: Picture) -> bytes:
    """The picture as a PNG, with its title in it."""
    width = min(max(PNG_WIDTH, picture.least_width), picture.most_width)
    chart = picture.chart.properties(width=width, title=picture.title).configure(**CONFIG)
    return vl_convert.vegalite_to_png(chart.to_json(), vl_version=_vega_lite(), scale=PNG_SCALE)


def _specification(picture: Picture) -> dict:
    """The chart for the page: as wide as there is room, and no address of its schema."""
    chart = picture.chart.properties(width="container").configure(**CONFIG)
    specification = chart.to_dict()
    del specification["$schema"]
    return specification


def _section(picture: Picture) -> str:
    # A paragraph is ours and may have code in it, between backquotes.
    pieces = escape(picture.text).split("`")
    text = "".join(
        f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces)
    )
    body = f'<section id="{picture.name}">\n<h2>{escape(picture.title)}</h2>\n<p>{text}</p>\n'
    if picture.chart:
        body += (
            f'<div class="wide"><div class="chart" id="chart-{picture.name}" '
            f'style="min-width: {picture.least_width}px; max-width: {picture.most_width}px">'
            "</div></div>\n"
        )
    if picture.table:
        head, *rows = picture.table
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = [f"<tr>{cells}</tr>"]
        for row in rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
            lines.append(f"<tr>{cells}</tr>")
        body += '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>\n"
    return body + "</section>"


def _vega_lite() -> str:
    """The version of Vega-Lite that Altair writes, as vl-convert names it: "6.1"."""
    return ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
