"""What the demo measured and what it means: asks → medians, verdict, JSON, tables. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType


class Phase(StrEnum):
    """The conditions under which a prompt was asked."""

    RECOMPUTE = "recompute"
    """Both caches bypassed: every token is computed."""
    PREFIX_HIT = "prefix_hit"
    """Right after it was computed: vLLM's own prefix cache has it."""
    RAYKV = "raykv"
    """vLLM's own cache was dropped: RayKV has the whole prompt."""
    NEW_QUESTION = "new_question"
    """vLLM's own cache was dropped: RayKV has the document, but not the question."""
    REMOTE = "remote"
    """Asked on a node that has nothing of the document: RayKV has the prompt on another one."""


PHASE_TITLES = {
    Phase.RECOMPUTE: "recompute",
    Phase.PREFIX_HIT: "vLLM's own cache",
    Phase.RAYKV: "RayKV",
    Phase.NEW_QUESTION: "RayKV, new question",
    Phase.REMOTE: "RayKV, other node",
}


@dataclass(frozen=True)
class DemoTokens:
    """Where the tokens of a prompt came from; the three add up to the prompt."""

    computed: int
    prefix_cache: int
    raykv: int

    def since(self, earlier: DemoTokens) -> DemoTokens:
        return DemoTokens(
            computed=self.computed - earlier.computed,
            prefix_cache=self.prefix_cache - earlier.prefix_cache,
            raykv=self.raykv - earlier.raykv,
        )


@dataclass(frozen=True)
class DemoAsk:
    """One prompt sent once. `token_ids` and `answer` are what came back.

    `bytes_fetched`: what RayKV copied from node to node meanwhile.
    """

    document: str
    question: str
    phase: Phase
    round: int
    prompt_tokens: int
    sources: DemoTokens
    ttft_s: float
    token_ids: tuple[int, ...]
    answer: str
    bytes_fetched: int = 0

    @property
    def as_intended(self) -> bool:
        """Whether the tokens came from where the phase wants them; else its time says nothing."""
        match self.phase:
            case Phase.RECOMPUTE:
                return self.sources.computed == self.prompt_tokens
            case Phase.PREFIX_HIT:
                return self.sources.prefix_cache > 0
            case Phase.RAYKV | Phase.NEW_QUESTION:
                return self.sources.raykv > 0
            case Phase.REMOTE:
                return self.sources.raykv > 0 and self.bytes_fetched > 0


@dataclass(frozen=True)
class DemoReport:
    """All that a run measured, and the verdict on it.

    `caveat`: what the answers are worth. `bytes_stored`, `bytes_loaded`: with those of warming up.
    """

    model: str
    caveat: str
    rounds: int
    asks: tuple[DemoAsk, ...]
    bytes_stored: int
    bytes_loaded: int
    pool_bytes: int

    def questions(self) -> list[list[DemoAsk]]:
        """The asks of each prompt, prompts in the order in which they were first asked."""
        grouped: dict[tuple[str, str], list[DemoAsk]] = {}
        for ask in self.asks:
            grouped.setdefault((ask.document, ask.question), []).append(ask)
        return list(grouped.values())

    @property
    def tokens_equal(self) -> bool:
        return all(same_tokens(asks) for asks in self.questions())

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that RayKV served, over all asks."""
        return sum(ask.sources.raykv for ask in self.asks)

    @property
    def bytes_fetched(self) -> int:
        """What RayKV copied from node to node, over all asks."""
        return sum(ask.bytes_fetched for ask in self.asks)

    @property
    def num_unintended(self) -> int:
        """Asks that another source than the wanted one served; the medians leave them out."""
        return sum(not ask.as_intended for ask in self.asks)

    @property
    def has_other_node(self) -> bool:
        """Whether an engine on another node was asked too."""
        return any(ask.phase is Phase.REMOTE for ask in self.asks)

    @property
    def exit_code(self) -> int:
        return 0 if self.tokens_equal else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "rounds": self.rounds,
            **_ttft_keys(self.asks),
            "tokens_equal": self.tokens_equal,
            "bytes_stored": self.bytes_stored,
            "bytes_loaded": self.bytes_loaded,
            "bytes_fetched": self.bytes_fetched,
            "pool_bytes": self.pool_bytes,
            "hit_tokens": self.hit_tokens,
            "num_unintended": self.num_unintended,
            "asks": [asdict(ask) for ask in self.asks],
        }


def ttft_s(asks: Sequence[DemoAsk], phase: Phase) -> float | None:
    """Median time to first token in `phase`; None if no ask of it went as intended."""
    times = [ask.ttft_s for ask in asks if ask.phase is phase and ask.as_intended]
    return median(times) if times else None


def same_tokens(asks: Sequence[DemoAsk]) -> bool:
    return len({ask.token_ids for ask in asks}) <= 1


def _ttft_keys(asks: Sequence[DemoAsk]) -> dict[str, float | None]:
    return {f"ttft_{phase.value}_s": ttft_s(asks, phase) for phase in Phase}


def show(report: DemoReport) -> RenderableType:
    """The report for a person: a table, the answers, the verdict."""
    answers = [_answers(asks) for asks in report.questions()]
    return Group(_phase_table(report), *answers, Text(), *_verdict(report))


def show_ask(ask: DemoAsk) -> Text:
    """One finished ask, for the running display."""
    sources = {
        "computed": ask.sources.computed,
        "vLLM": ask.sources.prefix_cache,
        "RayKV": ask.sources.raykv,
    }
    shares = " + ".join(f"{count:,} {name}" for name, count in sources.items() if count)
    return Text.assemble(
        (f"{ask.round}  ", "dim"),
        f"{PHASE_TITLES[ask.phase]:<19}",
        (f" {_seconds(ask.ttft_s):>7} s  ", "bold"),
        f"{ask.document:<14}  ",
        (shares, "dim"),
    )


def _phase_table(report: DemoReport) -> Table:
    columns = ("asks", "prompt tokens", "computed", "vLLM's cache", "RayKV", "TTFT, s", "gain")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("asked for", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    computed = ttft_s(report.asks, Phase.RECOMPUTE)
    for phase in Phase:
        asks = [ask for ask in report.asks if ask.phase is phase]
        if asks:
            counts = (
                sum(ask.prompt_tokens for ask in asks),
                sum(ask.sources.computed for ask in asks),
                sum(ask.sources.prefix_cache for ask in asks),
                sum(ask.sources.raykv for ask in asks),
            )
            median_s = ttft_s(asks, phase)
            gain = f"{computed / median_s:.1f}x" if computed and median_s else "-"
            cells = [f"{count:,}" for count in (len(asks), *counts)]
            table.add_row(PHASE_TITLES[phase], *cells, _seconds(median_s), gain)
    return table


def _answers(asks: Sequence[DemoAsk]) -> Text:
    first = asks[0]
    text = Text.assemble("\n", (f"{first.document}: ", "bold"), (first.question, "cyan"))
    if same_tokens(asks):
        return text.append(f"\n  {first.answer}")
    for ask in asks:
        text.append(f"\n  {PHASE_TITLES[ask.phase]}, round {ask.round}: {ask.answer}", "red")
    return text


def _verdict(report: DemoReport) -> Iterator[Text]:
    counts = [
        f"stored {_mebibytes(report.bytes_stored)}",
        f"loaded {_mebibytes(report.bytes_loaded)}",
    ]
    if report.has_other_node:
        counts.append(f"fetched {_mebibytes(report.bytes_fetched)} from node to node")
    served = f"served {report.hit_tokens:,} prompt tokens"
    yield Text(f"RayKV {', '.join(counts)} and {served}.")
    if report.num_unintended:
        yield Text(
            f"{report.num_unintended} of {len(report.asks)} asks were not served from where they "
            "should be; they are not in the times above. The log may say why.",
            "yellow",
        )
    yield Text(
        f"{report.caveat} What counts here is not whether an answer is right, but whether it is "
        "the same, token by token, with and without RayKV."
    )
    if report.tokens_equal:
        yield Text("Every answer was the same in all rounds.", "green")
    else:
        yield Text("AN ANSWER DIFFERED between rounds.", "bold red")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
