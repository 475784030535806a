"""What a chaos run has seen, and the verdict on it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

LOGPROB_TOLERANCE = 0.01
"""Between two computations of a token. Rounding in float32 moves it by 1e-5, a wrong block of KV by
more than 0.1."""

MORE_FDS = 16
MORE_BYTES = 128 << 20
"""By which a process may have grown at the end. vLLM's allocators keep what their largest batch so
far has needed: 80 MiB were seen."""


@dataclass(frozen=True)
class ChaosAnswer:
    """An answer of `ChildEngine.serve`; a request that was aborted has a `reason` alone.

    `reason` is "length" for a regular end. `gaps`: by how much the logprob of each token is above
    that of the next best one.
    """

    reason: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    gaps: Sequence[float] = ()
    cached: int = 0
    seconds: float = 0.0

    def agrees(self, reference: ChaosAnswer) -> bool:
        """Whether it is the beginning of what the reference says, with the same certainty.

        Where rounding may decide between two tokens, the rest may be another text.
        """
        for number, token in enumerate(self.tokens):
            ours, theirs = self.logprobs[number], reference.logprobs[number]
            if not math.isclose(ours, theirs, abs_tol=LOGPROB_TOLERANCE):
                return False
            if token != reference.tokens[number]:
                return reference.gaps[number] < LOGPROB_TOLERANCE
        return True


@dataclass(frozen=True)
class Process:
    """A part of RayKV, or an engine: resident bytes of its own, and open file descriptors."""

    name: str
    pid: int
    num_bytes: int
    num_fds: int


@dataclass
class FaultSeen:
    """A fault, and what became of it.

    `loads_again_s`: from its end until every engine had stored a new prompt and loaded it back;
    `fetches_again_s`: until another node's engine loaded it too. Both are None if that took longer
    than the deadline, or if the run did not wait.
    """

    number: int
    kind: str
    node: int
    lasts_s: float
    at_s: float
    note: str = ""
    waited: bool = False
    loads_again_s: float | None = None
    fetches_again_s: float | None = None

    @property
    def is_mended(self) -> bool:
        return not self.waited or (
            self.loads_again_s is not None and self.fetches_again_s is not None
        )

    def line(self) -> str:
        """Format the fault and its outcome."""
        parts = [f"{self.at_s:6.0f} s  {self.number:3d}  {self.kind}, node {self.node}"]
        if self.lasts_s:
            parts.append(f"{self.lasts_s:.1f} s")
        if self.note:
            parts.append(self.note)
        if self.waited:
            loads, fetches = (
                "never" if seconds is None else f"after {seconds:.1f} s"
                for seconds in (self.loads_again_s, self.fetches_again_s)
            )
            parts.append(f"loads again {loads}, fetches {fetches}")
        return ", ".join(parts)


@dataclass(kw_only=True)
class Seen:
    """Counts and findings of one engine's requests, or of all."""

    requests: int = 0
    aborted: int = 0
    lost_with_engine: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    probes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    worst_stall_s: float = 0.0

    def add(self, other: Seen) -> None:
        """Add another engine's counts; keep the worst stall."""
        for each in fields(Seen):
            mine, more = getattr(self, each.name), getattr(other, each.name)
            is_worst = each.name == "worst_stall_s"
            setattr(self, each.name, max(mine, more) if is_worst else mine + more)


@dataclass
class ChaosReport(Seen):
    """All counts and findings of a run."""

    seed: int
    num_nodes: int
    seconds: float = 0.0
    bytes_stored: int = 0
    bytes_fetched: int = 0
    faults: list[FaultSeen] = field(default_factory=list)
    before: list[Process] = field(default_factory=list)
    after: list[Process] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        """Processes that have more memory or descriptors than any of their name had before."""
        found = []
        for process in self.after:
            known = [other for other in self.before if other.name == process.name]
            if not known:
                continue
            fds = process.num_fds - max(other.num_fds for other in known)
            more = process.num_bytes - max(other.num_bytes for other in known)
            if fds > MORE_FDS:
                found.append(f"{process.name} ({process.pid}) has {fds} more file descriptors")
            if more > MORE_BYTES:
                found.append(f"{process.name} ({process.pid}) has {more >> 20} MiB more")
        return found

    @property
    def problems(self) -> list[str]:
        """A sentence for each problem; empty if the run succeeded."""
        found = [f"failed request: {text}" for text in self.failed]
        found += [f"wrong answer: {text}" for text in self.wrong]
        found += [
            f"fault {seen.number} ({seen.kind}): offloading did not work again"
            for seen in self.faults
            if not seen.is_mended
        ]
        found += self.grown
        found += [f"left over: {what}" for what in self.left_over]
        if not self.requests:
            found.append("no request was served")
        return found

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "grown": self.grown, "problems": self.problems}


def show(report: ChaosReport) -> RenderableType:
    """Format the report for a terminal."""
    parts: list[RenderableType] = [_numbers(report)]
    if report.problems:
        parts += [Text(f"✗ {problem}", style="bold red") for problem in report.problems]
    else:
        parts.append(
            Text(
                f"✓ {report.requests} requests, {len(report.faults)} faults: none failed, "
                "none was answered wrongly, and offloading came back each time.",
                style="bold green",
            )
        )
    return Group(*parts)


def _numbers(report: ChaosReport) -> Table:
    table = Table("", "", box=SIMPLE_HEAD, show_header=False)
    cached = 100 * report.cached_tokens / max(1, report.prompt_tokens)
    rows = {
        "seed, nodes": f"{report.seed}, {report.num_nodes} with an engine each",
        "seconds under load": f"{report.seconds:.0f}",
        "requests": f"{report.requests} ({report.aborted} taken back, "
        f"{report.lost_with_engine} lost with a killed engine)",
        "failed requests": str(len(report.failed)),
        "wrong answers": str(len(report.wrong)),
        "probes, each asked twice": str(report.probes),
        "prompt tokens out of a cache": f"{cached:.0f} %",
        "pre-emptions": str(report.preemptions),
        "stored, fetched": f"{report.bytes_stored >> 20} MiB, {report.bytes_fetched >> 20} MiB",
        "worst stall": f"{report.worst_stall_s:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
