"""The HTML around the pictures: nothing from outside, light and dark, a sheet for the printer.

Everything that comes in is text and is escaped here; only a Picture's SVG is markup.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from nxbucket.toolkit.report.style import CSS
from nxbucket.toolkit.report.svg import Picture

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


@dataclass(frozen=True)
class Table:
    """The first column names the row; the others are numbers, aligned to the right, but for a last
    one of words."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    ends_in_words: bool = False


@dataclass(frozen=True)
class Plot:
    """`caption` says in plain words what to see, `numbers` is what the picture was drawn from."""

    title: str
    picture: Picture
    caption: str
    numbers: Table


@dataclass(frozen=True)
class Section:
    heading: str
    parts: Sequence[Plot | Table | str] = field(default_factory=tuple)
    """A str is a paragraph."""


def render_page(
    command: str,
    title: str,
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    sections: Sequence[Section],
) -> str:
    body = "\n".join(_section(section) for section in sections if section.parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="nxbucket">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{CSS}</style>
</head>
<body>
<main>
<header>
<p class="command">nxbucket {escape(command)}</p>
<h1>{escape(title)}</h1>
{_facts(facts)}{_notes(notes)}</header>
{body}
</main>
</body>
</html>
"""


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    if not facts:
        return ""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n" for name, value in facts
    )
    return f"<dl>\n{items}</dl>\n"


def _notes(notes: Sequence[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def _section(section: Section) -> str:
    parts = "\n".join(_parts(section))
    return f"<section>\n<h2>{escape(section.heading)}</h2>\n{parts}\n</section>"


def _parts(section: Section) -> Iterator[str]:
    for part in section.parts:
        if isinstance(part, str):
            yield f"<p>{escape(part)}</p>"
        elif isinstance(part, Table):
            yield _table(part, section.heading)
        else:
            yield _figure(part)


def _figure(plot: Plot) -> str:
    return f"""<figure>
<h3>{escape(plot.title)}</h3>
<div class="wide">{plot.picture.wide}</div>
<div class="narrow">{plot.picture.narrow}</div>
<figcaption>{escape(plot.caption)}</figcaption>
<details><summary>The numbers</summary>
{_table(plot.numbers, plot.title)}
</details>
</figure>"""


def _table(table: Table, name: str) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    kind = ' class="words"' if table.ends_in_words else ""
    # What scrolls must be reachable by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )
