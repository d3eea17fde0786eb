"""Pictures of a plan: a file for ``--plot``, and bars in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from shardledger.errors import ConfigError
from shardledger.ledger.amounts import gib
from shardledger.ledger.categories import CATEGORIES
from shardledger.ledger.plot import COLORS, Label, Line, Moment, Picture, Rect, scale_limit, short_label, svg
from shardledger.ledger.row import Row

_FORMATS = (".svg", ".png")
_LETTERS = dict(zip(CATEGORIES, "PGMOACTF", strict=True))
_LEVELS = " ▁▂▃▄▅▆▇█"
_NARROW = 100


def check_plot(file: str) -> None:
    """Refuse a picture that cannot be drawn, before planning begins. Raises ConfigError."""
    suffix = Path(file).suffix.lower()
    if suffix not in _FORMATS:
        raise ConfigError(f"--plot {file}: pictures are written as .svg or .png, not {suffix or 'without a suffix'}")
    if suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            name = Path(file).with_suffix(".svg").name
            raise ConfigError(
                f"--plot {file}: a .png needs matplotlib, which is not installed; write --plot {name} (every browser "
                f"shows it), or pip install matplotlib"
            ) from None


def write_plot(file: str, drawn: Picture) -> None:
    """Write the picture into ``file``. Raises ConfigError when it cannot be written."""
    try:
        if Path(file).suffix.lower() == ".png":
            _write_png(drawn, file)
        else:
            Path(file).write_text(svg(drawn), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {file}: the file cannot be written: {error.strerror or error}") from None


def print_bars(
    rows: Sequence[Row],
    device_memory: int,
    timeline: Sequence[Moment] = (),
    *,
    where: str = "",
    stream: IO[str] | None = None,
) -> None:
    """Stacked bars with the device's memory as a line, and the memory of one step; letters stand for categories.

    ``where`` says which step, as `` at stage 3``.
    """
    console = Console(file=stream, highlight=False)
    width = console.width if console.is_terminal else _NARROW
    label = max(len(short_label(row)) for row in rows)
    chart = max(20, width - label - 14)
    limit = scale_limit((row.total for row in rows), device_memory)
    mark = min(chart - 1, round(device_memory / limit * chart))
    for row in rows:
        line = Text(f"{short_label(row):<{label}} ", no_wrap=True, overflow="crop")
        line.append_text(_bar(row, limit, chart, mark))
        line.append(f" {gib(row.total)}", style="bold" if row.total <= device_memory else "red")
        console.print(line, soft_wrap=True)
    console.print(f"{'':<{label + 1 + mark}}| device {gib(device_memory)}", soft_wrap=True)
    names = Text()
    for category in CATEGORIES:
        names.append(_LETTERS[category], style=f"black on {COLORS[category]}")
        names.append(f" {category}  ")
    console.print(names, soft_wrap=True)
    if timeline:
        console.print()
        for text in timeline_lines(timeline, min(width - 2, _NARROW), where):
            console.print(text, soft_wrap=True)


def timeline_lines(timeline: Sequence[Moment], width: int, where: str = "") -> list[str]:
    """One step as a row of blocks, the peak marked below it."""
    columns = min(width, len(timeline))
    cells: list[Moment] = []
    for column in range(columns):  # more moments than columns: the highest of those that share one
        part = timeline[column * len(timeline) // columns : (column + 1) * len(timeline) // columns]
        cells.append(max(part, key=lambda moment: moment[2]))
    highest = max(range(columns), key=lambda column: cells[column][2])
    phase, unit, count = cells[highest]
    top = max(count, 1)
    blocks = "".join(_LEVELS[max(1, round(cell[2] / top * 8))] for cell in cells)
    phases = "".join(cell[0][:1] for cell in cells)
    told = f"^ peak {gib(count)}, {phase} {unit}".rstrip()
    start = max(0, min(highest, width - len(told)))
    line = " " * start + told if start == highest else " " * highest + "^\n" + " " * start + told[2:]
    return [f"memory over one step{where} (i init, f forward, b backward, s step)", blocks, phases, *line.split("\n")]


def _bar(row: Row, limit: int, chart: int, mark: int) -> Text:
    """``chart`` cells; rounded so that the parts end where their sums do."""
    cells: list[tuple[str, str]] = []
    total = 0
    for category in CATEGORIES:
        total += getattr(row, category)
        end = min(chart, round(total / limit * chart))
        cells += [(_LETTERS[category], f"black on {COLORS[category]}")] * (end - len(cells))
    cells += [(" ", "")] * (chart - len(cells))
    if row.total > limit:
        cells[-1] = (">", "red")
    if cells[mark][0] == " ":
        cells[mark] = ("|", "")
    bar = Text()
    for letter, style in cells:
        bar.append(letter, style=style)
    return bar


def _write_png(drawn: Picture, file: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=200)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawn.width)
    axes.set_ylim(drawn.height, 0)
    axes.axis("off")
    aligned = {"start": "left", "middle": "center", "end": "right"}
    for shape in drawn.shapes:
        if isinstance(shape, Rect):
            axes.bar(shape.x, shape.height, shape.width, shape.y, align="edge", color=shape.color, linewidth=0)
        elif isinstance(shape, Line):
            axes.plot(
                (shape.x1, shape.x2), (shape.y1, shape.y2), "--" if shape.dashed else "-", color=shape.color, lw=0.8
            )
        elif isinstance(shape, Label):
            weight = "bold" if shape.bold else "normal"
            axes.text(
                shape.x, shape.y, shape.text, ha=aligned[shape.anchor], va="baseline", fontsize=8, fontweight=weight
            )
    FigureCanvasAgg(figure).print_png(file)
