"""The mover of small pages, without a GPU: Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from raykv.copy.cuda.pages import Addresses, TritonMover

pytest.importorskip("torch")

KERNEL = "raykv.copy.cuda.kernel"


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonMover]:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    yield TritonMover("cpu", lambda _: nullcontext())
    # It is the interpreted one.
    sys.modules.pop(KERNEL, None)


def column(numbers: list[int]) -> Addresses:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize(
    "sizes",
    [
        [8],
        [4096] * 20,
        [4096, 8, 16, 4104, 4088, 8192, 12296] * 3,
        [8] * 200,
    ],
)
def test_pages_arrive_and_nothing_else_is_written(mover: TritonMover, sizes: list[int]) -> None:
    random = np.random.default_rng(len(sizes))
    gaps = [8 * int(number) for number in random.integers(1, 5, len(sizes))]
    starts = np.cumsum([0, *(size + gap for size, gap in zip(sizes, gaps, strict=True))])
    source = random.integers(0, 1 << 62, starts[-1] // 8 + 8, np.int64)
    to = random.integers(0, 1 << 62, sum(sizes) // 8 + 8, np.int64)
    order = random.permutation(len(sizes)).tolist()
    places = np.cumsum([8, *(sizes[number] for number in order)]).tolist()
    expected = to.copy()
    for place, number in zip(places, order, strict=False):
        begin, words = int(starts[number]) // 8, sizes[number] // 8
        expected[place // 8 : place // 8 + words] = source[begin : begin + words]
    mover.move(
        0,
        column([to.ctypes.data + place for place in places[:-1]]),
        column([source.ctypes.data + int(starts[number]) for number in order]),
        column([sizes[number] for number in order]),
    )
    assert np.array_equal(to, expected)
