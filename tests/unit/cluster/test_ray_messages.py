"""What Ray says of errors elsewhere is logged; what workers print is printed."""

from __future__ import annotations

import pytest

from raykv.cluster.join import log_errors

ERROR = {"lines": ["a raylet's error"], "pid": "raylet", "is_err": False}
OUTPUT = {"lines": ["a worker's line"], "pid": 17, "ip": "10.0.0.1", "job": "01", "is_err": False}


def test_errors_are_logged_once_and_not_printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    log_errors()
    log_errors()
    with caplog.at_level("INFO", "raykv.ray"):
        worker.print_to_stdstream(ERROR, ignore_prefix=False)
        worker.print_to_stdstream(OUTPUT, ignore_prefix=True)
    assert caplog.messages == ["Ray says: a raylet's error"]
    assert capsys.readouterr().out.strip() == "a worker's line"
