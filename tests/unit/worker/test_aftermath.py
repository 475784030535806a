"""A killed process's memory: when it is safe, and how long it is waited for."""

from __future__ import annotations

import itertools

import pytest

from raykv.worker.aftermath import Aftermath, Killed, aftermath

EXIT_S, LAST_S = 2.0, 60.0
SAFE, WAIT, HOPELESS = Aftermath.SAFE, Aftermath.WAIT, Aftermath.HOPELESS


@pytest.mark.parametrize(
    ("since_s", "has_halted", "by_device", "expected"),
    [
        (1.9, True, False, WAIT),
        (2.0, True, False, SAFE),
        (2.0, False, False, WAIT),
        (2.0, True, True, WAIT),
        (59.9, False, False, WAIT),
        (59.9, True, True, WAIT),
        (60.0, False, False, HOPELESS),
        (60.0, True, True, HOPELESS),
        (60.0, True, False, SAFE),
    ],
)
def test_process_that_does_not_exit_is_judged_by_who_could_still_write(
    since_s: float, has_halted: bool, by_device: bool, expected: Aftermath
) -> None:
    assert aftermath(Killed(since_s, False, has_halted, by_device), EXIT_S, LAST_S) is expected


def test_memory_is_never_safe_while_somebody_may_write_and_nobody_waits_for_ever() -> None:
    for tenths, has_halted, by_device in itertools.product(
        range(1000), (False, True), (False, True)
    ):
        since_s = tenths / 10
        found = aftermath(Killed(since_s, False, has_halted, by_device), EXIT_S, LAST_S)
        if by_device or not has_halted:
            assert found is not SAFE
        if since_s >= LAST_S:
            assert found is not WAIT
        assert aftermath(Killed(since_s, True, has_halted, by_device), EXIT_S, LAST_S) is SAFE
