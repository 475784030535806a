"""The benchmark `gpu`: what engines are asked, what is noted, what is left of one that fails."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import pytest

from raykv.base.errors import SettingError
from raykv.lab.bench import gpu
from raykv.lab.bench.engine import EngineError, EngineProcess, FirstToken
from raykv.lab.bench.gpu import (
    BLOCK,
    BY_LAYER,
    DECODE,
    FULL,
    NATIVE,
    PLAIN,
    PREFILL,
    PREFIX_HIT,
    QUICK,
    RAYKV,
    RECOMPUTE,
    REUSE,
    START,
    Measuring,
    Requests,
    first_time,
    judged,
    length_case,
)
from raykv.lab.bench.report import Options, Result, Row

AMOUNTS = replace(
    QUICK,
    lengths=(2 * BLOCK, 4 * BLOCK),
    prefill=Requests(2, BLOCK, 2),
    decode=Requests(2, 16, 4),
    documents=Requests(2, 2 * BLOCK, 2),
)
OPTIONS = Options(quick=True, repeats=1)
MEANT = {START, *map(length_case, AMOUNTS.lengths), PREFILL, DECODE, REUSE}


class FakeEngine:
    """Knows prompts that it was given: those in its own cache until that is reset, and for good
    those that a connector has stored.
    """

    def __init__(self, *, stores: bool, fails_at: str = "", forgets: bool = False) -> None:
        self.start_s = 1.0
        self.is_stopped = False
        self._stores = stores and not forgets
        self._fails_at = fails_at
        self._own: set[tuple[int, ...]] = set()
        self._stored: set[tuple[int, ...]] = set()

    def _answer(self, tokens: list[int]) -> int:
        """How many tokens were cached."""
        names = {tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}
        known = [len(name) for name in names if name in self._own | self._stored]
        self._own |= names
        self._stored |= names if self._stores else set()
        return max(known, default=0)

    def call(self, do: str, **arguments: Any) -> Any:
        self._may_fail(do)
        return getattr(self, do)(**arguments)

    def _may_fail(self, do: str) -> None:
        if do == self._fails_at:
            raise EngineError("the engine has ended; its log ends with:\nMemoryError: no room\nbye")

    def first_token(self, tokens: list[int]) -> FirstToken:
        self._may_fail("first_token")
        return FirstToken(0.5, self._answer(tokens))

    def timed(self, batches: list[list[list[int]]], max_tokens: int = 1) -> dict[str, float]:
        cached = sum(self._answer(tokens) for batch in batches for tokens in batch)
        return {"seconds": 2.0, "cached": cached}

    def tokens(self, prompts: list[list[int]], max_tokens: int) -> None:
        for tokens in prompts:
            self._answer(tokens)
        assert max_tokens > 0

    def reset(self) -> bool:
        self._own.clear()
        return True

    def running(self) -> dict[str, str]:
        return {"vllm": "0.0"}

    def stop(self) -> None:
        self.is_stopped = True


class Bench:
    """A benchmark that measures fakes; `kept` has what was kept, part by part."""

    def __init__(self) -> None:
        self.kept: list[Result] = []
        self.result = Result("gpu")
        keep = lambda result: self.kept.append(copy.deepcopy(result))  # noqa: E731
        self.measuring = Measuring(replace(OPTIONS, keep=keep), AMOUNTS, self.result)
        self.num_settled = 0

    def measure(self, name: str, engine: FakeEngine) -> None:
        self.measuring.subject(name, lambda: cast(EngineProcess, engine), self._settle)
        assert engine.is_stopped

    def _settle(self) -> None:
        self.num_settled += 1

    def subjects(self, case: str) -> list[str]:
        return [row.subject for row in self.result.rows if row.case == case]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(gpu, "WARM_S", 0.0)
    monkeypatch.setattr(gpu, "PAUSE_S", 0.0)
    return Bench()


def test_all_engines_are_asked_the_same_and_judged(bench: Bench) -> None:
    for name in (RAYKV, NATIVE, PLAIN, BY_LAYER):
        bench.measure(name, FakeEngine(stores=name != PLAIN))
    assert {row.case for row in bench.result.rows} == MEANT
    for length in AMOUNTS.lengths:
        assert bench.subjects(length_case(length)) == [
            first_time(RAYKV),
            RAYKV,
            first_time(NATIVE),
            NATIVE,
            RECOMPUTE,
            PREFIX_HIT,
            first_time(BY_LAYER),
            BY_LAYER,
        ]
    for case in (PREFILL, DECODE, REUSE):
        assert bench.subjects(case) == [RAYKV, NATIVE, PLAIN]
    assert len(bench.result.verdicts) == 2 * len(AMOUNTS.lengths) + 3
    assert all(verdict.measured == 1.0 for verdict in bench.result.verdicts)
    assert not [note for note in bench.result.notes if "only" in note or "failed" in note]
    # RayKV's stores alone are asked about.
    assert bench.num_settled > 0


def test_rate_is_that_of_requests_and_of_output_tokens(bench: Bench) -> None:
    bench.measure(PLAIN, FakeEngine(stores=False))
    assert bench.result.row(PREFILL, PLAIN).values == (1.0,)
    assert bench.result.row(DECODE, PLAIN).values == (4.0,)
    assert bench.result.row(REUSE, PLAIN).values == (1.0,)


def test_prompt_that_was_not_loaded_is_noted_once(bench: Bench) -> None:
    bench.measure(NATIVE, FakeEngine(stores=True, forgets=True))
    assert any("loads nothing" in note for note in bench.result.notes)
    noted = [note for note in bench.result.notes if "only" in note]
    assert len(noted) == len(set(noted)) == len(AMOUNTS.lengths) + 1
    assert all(note.startswith(NATIVE) for note in noted)


@pytest.mark.parametrize(
    ("fails_at", "part", "has"),
    [
        ("first_token", "start", {START}),
        ("timed", "nothing is reused", {START, *map(length_case, AMOUNTS.lengths)}),
    ],
)
def test_engine_that_fails_leaves_its_parts_and_the_next_is_measured(
    bench: Bench, fails_at: str, part: str, has: set[str]
) -> None:
    bench.measure(NATIVE, FakeEngine(stores=True, fails_at=fails_at))
    assert {row.case for row in bench.result.rows} == has
    (note,) = [note for note in bench.result.notes if "failed" in note]
    assert note.startswith(f"{NATIVE}, {part}: failed")
    assert note.endswith("MemoryError: no room")
    bench.measure(RAYKV, FakeEngine(stores=True))
    assert {row.case for row in bench.result.rows} == MEANT


def test_reason_is_the_last_errors_of_the_log_each_once_or_its_end() -> None:
    lines = [
        "(EngineCore pid=1) ERROR [core.py:1] RuntimeError: the first",
        "ValueError: not enough room",
        "  File x, line 3",
        "(EngineCore pid=1) ERROR [core.py:1] ValueError: not enough room",
        "Exception: only on CUDA",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    told = gpu.reason_of(EngineError("\n".join(lines)))
    assert told == "ValueError: not enough room | Exception: only on CUDA"
    assert gpu.reason_of(EngineError("x" * 1000 + "killed")).endswith("xkilled")
    assert len(gpu.reason_of(EngineError("x" * 1000))) == 300


def test_engine_that_does_not_start_is_noted(bench: Bench) -> None:
    def start() -> EngineProcess:
        raise EngineError("no room in /dev/shm")

    bench.measuring.subject(NATIVE, start, lambda: None)
    assert not bench.result.rows
    assert f"{NATIVE}, start: failed: no room in /dev/shm" in bench.result.notes


def test_what_there_is_is_kept_after_each_length_and_part(bench: Bench) -> None:
    bench.measure(PLAIN, FakeEngine(stores=False))
    cases = [len({row.case for row in result.rows}) for result in bench.kept]
    assert cases == sorted(cases)
    # The start and one length, both lengths, then what each part adds.
    assert list(dict.fromkeys(cases)) == [2, 3, 5, 6]


def test_full_sizes_fit_into_the_memory_that_is_meant_for_them() -> None:
    token_bytes = 2 * 2 * 32 * 8 * 128
    kv_tokens = gpu.ON_GPU["kv_cache_memory_bytes"] // token_bytes
    documents = FULL.documents.num_requests * FULL.documents.prompt_tokens
    assert kv_tokens > FULL.max_tokens
    assert documents > 1.5 * kv_tokens
    assert documents * token_bytes < 0.9 * FULL.pool_bytes
    assert max(FULL.lengths) * token_bytes < FULL.pool_bytes
    assert FULL.decode.num_requests * (512 + 256) < kv_tokens


def test_machine_without_a_gpu_and_unknown_systems_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SettingError, match="torch sees no GPU"):
        gpu.run(Options())


ROWS = [
    Row("256 tokens", RAYKV, "s", (1.0, 2.0)),
    Row("256 tokens", NATIVE, "s", (2.0, 2.0)),
    Row("256 tokens", BY_LAYER, "s", (1.0,)),
    Row(PREFILL, RAYKV, "requests/s", (97.0,)),
    Row(PREFILL, PLAIN, "requests/s", (100.0,)),
    Row(REUSE, RAYKV, "requests/s", (3.0,)),
]


def test_what_has_been_measured_as_often_is_judged() -> None:
    verdicts = judged(Result("gpu", "", ROWS), (256,))
    assert [(each.measured, each.is_met) for each in verdicts] == [(0.75, True), (0.97, False)]
    assert "at most 1 x the s of vLLM's native offloading" in verdicts[0].budget
    assert "at least 0.98 x the requests/s of vLLM alone" in verdicts[1].budget
