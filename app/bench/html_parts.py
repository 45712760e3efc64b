"""Small pieces of HTML, everything that is not ours escaped; and the page around them, which loads nothing."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { padding: .25rem .45rem; border-bottom: 1px solid #e2e2e2; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; } td.text:not(:first-child) { white-space: normal; }
thead th { background: #f4f4f4; } img { max-width: 100%; }
.better { background: #d8efd9; } .worse { background: #f7d9d6; } .other { color: #999; }
.note { color: #666; max-width: 60rem; } .warn { background: #fff3cd; padding: .5rem .8rem; }
"""


class ReadyCell(str):
    """A whole `<td>` element, made by us: the only text that `table` does not escape."""


def page(title: str, body: Iterable[str], style: str = "", script: str = "") -> str:
    """A whole document. title is escaped; body, style and script are HTML already."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}{style}</style>\n</head>\n<body>\n{chr(10).join(body)}\n"
        f"{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,)) -> str:
    """head and cells are escaped, unless a cell is a `ReadyCell`; text_columns are aligned to the left."""

    def cell(value: str, column: int, tag: str) -> str:
        if isinstance(value, ReadyCell):
            return value
        kind = ' class="text"' if column in text_columns else ""
        return f"<{tag}{kind}>{escape(value)}</{tag}>"

    def line(values: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(cell(value, column, tag) for column, value in enumerate(values))}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def picture(path: Path, what: str) -> str:
    """The image itself, inside the page."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{escape(what)}" src="data:image/png;base64,{data}"></p>'


def paragraph(text: str, kind: str = "") -> str:
    """An escaped paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def interval(value: Sequence[float] | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value[0]:.{digits}f} to {value[1]:.{digits}f}"
