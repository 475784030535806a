"""What commands that bring chunks to a node print at their end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import typer

from raykv.cli import transfers
from raykv.cli.transfers import report
from raykv.protocol.operator import TransferResult

PART = TransferResult(
    asked=1040, came=1032, num_bytes=1 << 20, there=1, nowhere=2, no_room=4, refusals={"CORRUPT": 1}
)


def test_report_counts_what_did_not_come_and_says_why_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended:
        report(PART, as_json=False, which=", so only the first ones came")
    assert ended.value.exit_code == 1
    first, *reasons = capsys.readouterr().out.splitlines()
    assert first.startswith("1,032 of 1,040 chunks came (1.0 MiB in")
    assert first.endswith(", 1 were there already, 7 did not come")
    assert reasons == [
        "2 are stored nowhere",
        "1 failed: CORRUPT",
        "there was no room for 4: the pool can evict no more, so only the first ones came",
    ]


def test_report_of_a_move_says_what_others_have_given_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended:
        report(TransferResult(asked=2, came=2, dropped=1, kept=1), as_json=False)
    assert ended.value.exit_code == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "0 did not come, 1 copies were given up elsewhere, 1 copies stay" in line


def test_report_as_json_has_all_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        report(PART, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["failed"], told["no_room"], told["refusals"]) == (7, 4, {"CORRUPT": 1})


def test_bar_counts_every_chunk_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Mapping[str, tuple[int, int]]] = []
    monkeypatch.setattr(transfers, "bars", lambda *, as_json: nullcontext(told.append))
    with transfers.counting("move", as_json=False) as watch:
        watch(PART)
    assert told == [{"move": (0, 0)}, {"move": (1040, 1040)}]
