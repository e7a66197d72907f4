"""Pictures as inline SVG: drawn by matplotlib, coloured by the page's own style sheet.

matplotlib draws with a placeholder for each colour; what comes out is rewritten to custom
properties, so one picture serves light and dark. Every picture is drawn twice, for a wide and a
narrow window: text keeps its size.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from nxbucket.toolkit.report.report_file import without_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, NARROW = 880, 360
"""CSS pixels."""
TEXT, SMALL = 12.5, 11.5
"""Sizes of letters."""
_NAMES = (
    *("surface", "ink", "muted", "rule", "idle", "limit"),
    *("prefill", "prefill-fill", "prefill-soft"),
    *("decode", "decode-fill", "decode-soft"),
    *("s1", "s2", "s3", "s4", "s5", "s6"),
)
COLOURS = {name: f"#0a0b{number:02x}" for number, name in enumerate(_NAMES, 1)}
_PLACEHOLDER = re.compile("|".join(COLOURS.values()))
_VARIABLE = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_DECIMALS = re.compile(r"-?\d+\.\d+")
_ROUNDED = {"x", "y", "width", "height"}

Anchor = Literal["left", "center", "right"]


@dataclass(frozen=True)
class Picture:
    wide: str
    narrow: str


class Canvas:
    """A drawing in CSS pixels, counted from the top left."""

    def __init__(self, width: int, height: int) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        # The SVG backend's own resolution: one unit is one pixel.
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)

    @property
    def is_narrow(self) -> bool:
        return self.width < WIDE

    def axes(self, left: float, top: float, right: float, bottom: float) -> "Axes":
        width, height = self.width, self.height
        return self.figure.add_axes(
            (
                left / width,
                1 - bottom / height,
                (right - left) / width,
                (bottom - top) / height,
            )
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        *,
        anchor: Anchor = "left",
        size: float = TEXT,
        bold: bool = False,
    ) -> None:
        """`y` is the base line."""
        self.figure.text(
            x / self.width,
            1 - y / self.height,
            text,
            color=COLOURS[colour],
            ha=anchor,
            va="baseline",
            fontsize=size,
            fontweight="bold" if bold else "normal",
        )

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str, **style: object) -> None:
        from matplotlib.lines import Line2D

        points = [x / self.width for x in xs], [1 - y / self.height for y in ys]
        given = {"linewidth": 1.0, **style}
        self.figure.add_artist(Line2D(*points, color=COLOURS[colour], **given))  # type: ignore[arg-type]


def draw(name: str, label: str, paint: Callable[[int], Canvas]) -> Picture:
    """`name` is unique on its page and begins every id in the SVG; `label` is read aloud.

    Raises EnvironmentProblem without matplotlib.
    """
    with _drawing(name):
        return Picture(
            _inline(paint(WIDE), f"{name}-w", label), _inline(paint(NARROW), f"{name}-n", label)
        )


@contextmanager
def _drawing(name: str) -> Iterator[None]:
    """With matplotlib's defaults, whatever a matplotlibrc says; what was set before comes back."""
    try:
        import matplotlib
    except ImportError as err:
        raise without_matplotlib() from err
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        # Comes with matplotlib, so places are the same everywhere, and it is wider than what
        # browsers show.
        "font.family": "DejaVu Sans",
        "font.size": TEXT,
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "hatch.linewidth": 1.2,
        "path.simplify": False,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def _inline(canvas: Canvas, name: str, label: str) -> str:
    file = BytesIO()
    canvas.figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for child in list(root):
        if child.tag == f"{_SVG}metadata":
            root.remove(child)
    parents = {child: parent for parent in root.iter() for child in parent}
    for element in list(root.iter()):
        if element.tag == f"{_SVG}style":
            parents[element].remove(element)
    text = "".join(f"{element.attrib}" for element in root.iter())
    used = set(re.findall(r"#([\w-]+)", text))
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib = dict(_attributes(element.attrib, name, used))
        if element.tag not in ("text", "tspan"):
            element.text = None
        element.tail = None
    _flatten(root)
    root.attrib = {
        "viewBox": f"0 0 {canvas.width} {canvas.height}",
        "width": str(canvas.width),
        "height": str(canvas.height),
        "role": "img",
        "aria-label": label,
    }
    return ElementTree.tostring(root, encoding="unicode")


def _attributes(given: dict[str, str], name: str, used: set[str]) -> Iterator[tuple[str, str]]:
    for key, value in given.items():
        if key == "id":
            if value in used:
                yield key, f"{name}-{value}"
        elif key == _LINK:
            yield "href", f"#{name}-{value.removeprefix('#')}"
        elif key == "d":
            yield key, shortened(_DECIMALS.sub(_rounded, value))
        elif key in _ROUNDED:
            yield key, _DECIMALS.sub(_rounded, value)
        elif key == "transform" and value.startswith("rotate(-0 "):
            pass
        elif key == "style":
            style = _without_family(value).replace("url(#", f"url(#{name}-")
            yield key, _PLACEHOLDER.sub(_as_variable, style)
        elif key in ("fill", "stroke") and value in _VARIABLE:
            yield "style", f"{key}: {_VARIABLE[value]}"
        else:
            yield key, value.replace("url(#", f"url(#{name}-")


def _flatten(element: ElementTree.Element) -> None:
    """Groups that say nothing give way to what is in them."""
    children = []
    for child in element:
        _flatten(child)
        children += list(child) if child.tag == "g" and not child.attrib else [child]
    element[:] = children


def shortened(path: str) -> str:
    """The same line with fewer letters: H and V, and no stops on a way straight on."""
    words = path.split()
    if not set(words[::3]) <= {"M", "L"} or len(words) % 3:
        return _shortened_boxes(words)
    parts = [(words[i], words[i + 1], words[i + 2]) for i in range(0, len(words), 3)]
    return " ".join(_steps(parts))


def _shortened_boxes(words: list[str]) -> str:
    """Of closed pieces, each by itself; as it came if there are curves in it."""
    pieces = " ".join(words).split(" z")
    if len(pieces) < 2 or any(letter in words for letter in "CQA"):
        return " ".join(words)
    return " ".join(f"{shortened(piece)} z" for piece in pieces if piece.strip())


def _steps(parts: list[tuple[str, str, str]]) -> Iterator[str]:
    kept: list[tuple[str, str, str]] = []
    for part in parts:
        while (
            len(kept) > 1 and part[0] == kept[-1][0] == "L" and _on_a_line(kept[-2], kept[-1], part)
        ):
            kept.pop()
        kept.append(part)
    x = y = ""
    for letter, next_x, next_y in kept:
        if letter == "M" or (next_x != x and next_y != y):
            yield f"{letter} {next_x} {next_y}"
        elif next_x != x:
            yield f"H {next_x}"
        elif next_y != y:
            yield f"V {next_y}"
        x, y = next_x, next_y


def _on_a_line(*parts: tuple[str, str, str]) -> bool:
    """Level or upright, and on in the same direction."""
    for fixed, moving in ((1, 2), (2, 1)):
        if parts[0][fixed] == parts[1][fixed] == parts[2][fixed]:
            places = [float(part[moving]) for part in parts]
            return places in (sorted(places), sorted(places, reverse=True))
    return False


def _without_family(style: str) -> str:
    kept = (part.strip() for part in style.split(";"))
    return "; ".join(part for part in kept if part and not part.startswith("font-family"))


def _as_variable(found: re.Match[str]) -> str:
    return _VARIABLE[found[0]]


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")
