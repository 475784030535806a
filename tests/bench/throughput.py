"""`throughput`: requests per second of a multi-turn load that does not fit into vLLM's own cache.

Documents take turns; each turn asks another question about its document. The documents together
are three times what vLLM's KV cache holds, so that without RayKV each turn computes its document
again. Without reuse, every request has a document of its own: what RayKV costs then. The time per
output token is measured while stores run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from tests.bench.serving import BLOCK, Bed

WITHOUT, WITH = "without RayKV", "with RayKV"
REUSE, NO_REUSE, DECODE = "documents are reused", "nothing is reused", "time per output token"

LEAST_GAIN = 2.0
LEAST_SHARE = 0.97
DECODE_TOKENS = 32


class _Load:
    """Prompts for one repeat."""

    def __init__(self, *, quick: bool) -> None:
        self.document_tokens = (2 if quick else 8) * BLOCK
        self.question_tokens = BLOCK // 2
        self.num_documents = 3 if quick else 6
        self.num_turns = 2 if quick else 3
        # A third of the documents fit.
        tokens = self.num_documents * (self.document_tokens + BLOCK)
        self.kv_blocks = tokens // 3 // BLOCK + 1
        self._next = 10_000

    def fresh(self) -> int:
        """A seed that was not used before."""
        self._next += 1
        return self._next

    def reused(self) -> list[list[list[int]]]:
        """Batches of one request: turn by turn, document by document."""
        documents = [prompt(self.fresh(), self.document_tokens) for _ in range(self.num_documents)]
        return [
            [document + prompt(self.fresh(), self.question_tokens)]
            for _ in range(self.num_turns)
            for document in documents
        ]

    def never_reused(self) -> list[list[list[int]]]:
        """Twice as many requests of the same length that share no prefix."""
        length = self.document_tokens + self.question_tokens
        count = self.num_documents * 2
        return [[prompt(self.fresh(), length)] for _ in range(count)]


def run(options: Options) -> Result:
    """See the module's docstring."""
    load = _Load(quick=options.quick)
    result = Result("throughput")
    pool_bytes = (256 << 20) if options.quick else (4 << 30)
    context = load.document_tokens + 2 * BLOCK
    with Bed(quick=options.quick, max_tokens=context, pool_bytes=pool_bytes) as bed:
        config: dict[str, Any] = {"num_gpu_blocks_override": load.kv_blocks + 8}
        starts = partial(bed.plain, **config), partial(bed.raykv, **config)
        engines = dict(zip((WITHOUT, WITH), started_together(*starts), strict=True))
        bed.wait_for_pools()
        for engine in engines.values():
            engine.call("timed", batches=load.never_reused()[:1])
        for _ in range(options.repeats_or(3)):
            _measure(result, engines, load)
    reuse, none, decode = (result.ratio(case, WITH, WITHOUT) for case in (REUSE, NO_REUSE, DECODE))
    result.at_least(LEAST_GAIN, reuse, "with reuse at least 2 x the requests")
    result.at_least(LEAST_SHARE, none, "without reuse at most 3 % fewer")
    result.notes.append(f"While stores run, an output token takes {decode:.3f} x as long.")
    return result


def _measure(result: Result, engines: dict[str, EngineProcess], load: _Load) -> None:
    """One repeat."""
    for case, batches, tokens in (
        (REUSE, load.reused(), 1),
        (NO_REUSE, load.never_reused(), 1),
        (DECODE, [[one for batch in load.never_reused()[:2] for one in batch]], DECODE_TOKENS),
    ):
        for name, engine in engines.items():
            answer = engine.call("timed", batches=batches, max_tokens=tokens)
            unit, value = "requests/s", len(batches) / answer["seconds"]
            if case is DECODE:
                unit, value = "ms", answer["seconds_per_token"] * 1e3
            result.add(case, name, unit, value)
            engine.reset()
