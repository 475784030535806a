"""What `raykv bench footprint` counts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.shared_memory import SharedMemory

import pytest

from raykv.lab.bench import footprint

MIB = 1 << 20


def grown_by(make: Callable[[], object]) -> int:
    """In a small process: of what is shared each has the less, the more there are, and they come
    and go.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_grown_by, make).result(120.0)


def _grown_by(make: Callable[[], object]) -> int:
    before = footprint.taken([os.getpid()]).num_bytes
    made = make()
    after = footprint.taken([os.getpid()]).num_bytes
    del made
    return after - before


def fill_own() -> object:
    return bytearray(b"x") * (64 * MIB)


def fill_shared() -> object:
    shared = SharedMemory(create=True, size=64 * MIB)
    shared.unlink()
    assert shared.buf is not None
    shared.buf[:] = bytes(1) * (64 * MIB)
    return shared


def test_memory_of_a_process_grows_by_what_it_fills() -> None:
    assert 48 * MIB < grown_by(fill_own) < 96 * MIB


def test_memory_of_a_process_is_without_what_it_shares() -> None:
    assert grown_by(fill_shared) < 32 * MIB


def test_two_processes_take_what_each_takes() -> None:
    one = footprint.taken([os.getpid()])
    both = footprint.taken([os.getpid(), os.getppid()])
    assert both.num_threads > one.num_threads
    assert both.num_files > one.num_files


@pytest.mark.parametrize("measure", [footprint.index_bytes, footprint.view_bytes])
def test_chunks_take_less_than_a_kibibyte_each(measure: Callable[[int], int]) -> None:
    """In a process of its own: memory that was freed before would be used again."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        num_bytes = process.submit(measure, 20_000).result(120.0)
    assert 20_000 * 50 < num_bytes < 20_000 * 1024
