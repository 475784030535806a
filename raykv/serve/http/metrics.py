"""One page of metrics out of those of all replicas.

A scraper that asked replicas in turn through an ingress would see counters jump to and fro. So each
page's samples get two labels, `deployment` and `replica`, and all of them go into one page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ReplicaMetrics:
    """A replica's own page in Prometheus' text format."""

    deployment: str
    replica: str
    text: str


@dataclass
class _Family:
    """What is known of a metric: comments, from the first page that has it, and samples."""

    comments: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merge(pages: Iterable[ReplicaMetrics]) -> bytes:
    """All pages in one: each family once, as Prometheus wants it, with the samples of all."""
    families: dict[str, _Family] = {}
    for page in pages:
        labels = f'deployment="{_escaped(page.deployment)}",replica="{_escaped(page.replica)}"'
        own: set[str] = set()
        for name, line in _lines(page.text):
            if name not in families:
                families[name] = _Family()
                own.add(name)
            family = families[name]
            if not line.startswith("#"):
                family.samples.append(_labelled(line, labels))
            elif name in own:
                family.comments.append(line)
    lines = [line for each in families.values() for line in (*each.comments, *each.samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the family that it belongs to: the last one that was announced."""
    family = ""
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            family = line.split(" ", 3)[2]
        if line.strip():
            yield family, line


def _labelled(sample: str, labels: str) -> str:
    """`sample` with `labels` before its own."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        return f"{sample[:brace]}{{{labels}{'' if rest.startswith('}') else ','}{rest}"
    return f"{sample[:space]}{{{labels}}}{sample[space:]}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
