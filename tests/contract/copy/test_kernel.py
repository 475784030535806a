"""What is the compiled kernel's alone: pieces of a run, the loading, and life without it."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest

from raykv.base.ids import SLOT_ALIGNMENT
from raykv.copy.engine import StopSign
from raykv.copy.rows import RowCopier, Side, by_memmove, kernel
from raykv.memory.words import Word
from tests.fixtures.node.links import Worker
from tests.fixtures.node.local import LocalNode
from tests.fixtures.waiting import wait_until

SIZE = 3 << 20


def test_long_run_is_given_up_between_two_pieces() -> None:
    from raykv.copy.kernel import PIECE_BYTES

    source, target = np.full(SIZE, 7, np.uint8), np.zeros(SIZE + 8, np.uint8)
    to = target[-target.ctypes.data % 8 :][:SIZE]
    zero = np.zeros(1, np.int64)
    stop = StopSign([Word(to.ctypes.data + PIECE_BYTES, int.from_bytes(b"\7" * 8, sys.byteorder))])
    sides = Side(to.ctypes.data, zero), Side(source.ctypes.data, zero)
    assert not kernel()(*sides, zero + SIZE, stop)
    assert np.count_nonzero(to) == 2 * PIECE_BYTES
    assert not to[2 * PIECE_BYTES :].any()


def test_rows_are_copied_without_the_kernel_when_there_is_no_numba(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "raykv.copy.kernel", raising=False)
    rows = RowCopier()
    with caplog.at_level(logging.WARNING):
        rows.load()
    assert rows.copy is by_memmove
    (record,) = caplog.records
    assert "numba" in record.getMessage()


def test_kernel_that_can_be_loaded_copies_the_rows() -> None:
    rows = RowCopier()
    rows.load()
    assert rows.copy is not by_memmove


def test_rows_are_copied_without_a_kernel_that_fails_its_trial(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import raykv.copy.kernel

    monkeypatch.setattr(raykv.copy.kernel, "copy_rows", lambda *_: True)
    rows = RowCopier()
    with caplog.at_level(logging.WARNING):
        rows.load()
    assert rows.copy is by_memmove
    assert "trial" in caplog.text


def test_kernel_is_compiled_when_its_cache_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CacheImpl

    from raykv.copy.kernel import compiled, copy_rows

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    fresh = compiled(copy_rows.py_func)  # type: ignore[attr-defined]
    source, to = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    zero = np.zeros(1, np.int64)
    rows = StopSign().rows
    assert fresh(to.ctypes.data, zero, source.ctypes.data, zero, zero + 100, rows)
    assert np.array_equal(to, source)


def test_service_loads_the_kernel_for_the_first_worker_in_host_memory() -> None:
    """A node whose engines are on GPUs does without it, and without the memory that it takes."""
    node, loaded = LocalNode(), list[str]()
    node.service.rows.load = lambda: loaded.append("kernel")  # type: ignore[method-assign]
    node.start()
    assert loaded == []
    for _ in range(2):
        worker = Worker(node, [SLOT_ALIGNMENT], 1)
        wait_until(lambda: bool(loaded), 10, "it is loaded")
        worker.end()
    node.stop()
    assert loaded == ["kernel"], "once"
