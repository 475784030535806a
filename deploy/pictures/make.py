"""Draws the pictures of README: `python deploy/pictures/make.py`.

`first-token.svg` has the numbers of `RESULTS`. `top.svg` shows `top.json`, an example in
the form that `raykv top --json` prints. `parts.svg` is drawn by hand.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import msgspec
from rich.console import Console

from raykv.cli.status import Progress
from raykv.cli.top import screen
from raykv.protocol.status import ClusterStatus

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "tests" / "bench" / "RESULTS.md"

ENTRY = "* On an H200, 27 November 2026, since each node decides for itself"
"""Where the entry of the plot's numbers begins."""
RUN = "One H200, Llama 8B's shape in bfloat16, vLLM 0.33, 27 November 2026"
PROMPTS = ("1,024 tokens", "4,096", "16,384", "32,768")
SERIES = {
    "computed, vLLM alone": ("computed", "#9aa4b2"),
    "loaded, RayKV / native": ("loaded by RayKV", "#1f77d0"),
    "vLLM's own prefix hit": ("hit in vLLM's own cache (GPU memory)", "#5fb878"),
}
"""By the name of its row: what the plot calls it, and its colour."""

INK, PALE = "#1f2933", "#616e7c"
FONT = "Helvetica, Arial, sans-serif"


class Terminal(msgspec.Struct, frozen=True):
    """What `raykv top --json` prints."""

    status: ClusterStatus
    progress: Progress


def words(x: float, y: float, text: str, *, size: int = 12, fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}">{escape(text)}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" fill="{fill}"/>'
    )


def measured(results: str) -> dict[str, list[float]]:
    """Milliseconds by the name of a row, for each of `PROMPTS`.

    Raises:
        ValueError: the entry, or one of its rows, is not there any more.
    """
    _, _, entry = results.partition(ENTRY)
    rows: dict[str, list[float]] = {}
    for line in entry.splitlines():
        name, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if name in SERIES and name not in rows:
            rows[name] = [float(cell.split(" / ")[0].replace(",", "")) for cell in cells]
    if rows.keys() != SERIES.keys():
        raise ValueError(f"{RESULTS.name} has no entry {ENTRY!r} with the rows {list(SERIES)}")
    return rows


def first_token() -> str:
    """Time to the first token, by where a prompt's KV comes from."""
    rows = measured(RESULTS.read_text())
    left, thick, group, above = 112, 20, 80, 96
    scale = 520 / max(map(max, rows.values()))
    parts = [
        words(20, 30, "Time to first token, by where the prompt's KV comes from", size=16),
        words(20, 50, f"{RUN}; milliseconds, less is better", fill=PALE),
    ]
    x = left
    for name, fill in SERIES.values():
        parts += [rectangle(x, 64, 11, 11, fill), words(x + 17, 74, name)]
        x += 50 + 7 * len(name)
    for i, prompt in enumerate(PROMPTS):
        y = above + i * group
        parts.append(words(20, y + 33, prompt, size=13))
        for row, (_, fill) in SERIES.items():
            width = rows[row][i] * scale
            parts.append(rectangle(left, y, width, thick - 3, fill))
            parts.append(words(left + width + 6, y + 13, f"{rows[row][i]:,.0f}"))
            y += thick
    return drawing(720, above + len(PROMPTS) * group, "Time to first token", parts)


def drawing(width: int, height: int, title: str, parts: list[str]) -> str:
    """A picture on white ground, which dark pages need."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">',
            f"<title>{escape(title)}</title>",
            rectangle(0, 0, width, height, "#ffffff"),
            *parts,
            "</svg>\n",
        ]
    )


def top() -> str:
    """A terminal with `raykv top`."""
    recorded = msgspec.json.decode((FOLDER / "top.json").read_bytes(), type=Terminal)
    console = Console(
        record=True, width=100, file=io.StringIO(), highlight=False, markup=False, _environ={}
    )
    console.print(screen(recorded.status, recorded.progress))
    drawn = console.export_svg(title="raykv top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # fonts of another host


PICTURES: dict[str, Callable[[], str]] = {
    "first-token.svg": first_token,
    "top.svg": top,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
