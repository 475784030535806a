"""RESULTS.md has the tables of the runs that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raykv.lab.bench.report import Result, Row, Verdict, document
from tests.bench import tables


def test_page_is_what_the_command_makes() -> None:
    assert tables.TARGET.read_text() == tables.page(), "run: python -m tests.bench tables"


def test_table_has_rows_machine_date_and_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result("pool", "how fast", [Row("a case", "RayKV", "ms", (3.0, 1.0, 2.0))])
    result.verdicts = [Verdict("at most 1 ms", 2.0, 1.0), Verdict("at most 9 ms", 2.0, 9.0)]
    result.notes = ["All of it on an H200."]
    (tmp_path / "pool.json").write_text(json.dumps(document([result], "1.0", "2026-11-27")))
    (tmp_path / "page.md").write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TARGET", tmp_path / "page.md")
    page = tables.page()
    assert page.startswith(f"before\n{tables.BEGIN}\n\n**`pool`**: how fast. 2026-11-27, RayKV 1.0")
    assert "| a case | RayKV | 2 | 1 | 3 | ms |" in page
    assert "* at most 1 ms: 2, **not met**\n* at most 9 ms: 2\n* All of it on an H200.\n" in page
    assert page.endswith(f"{tables.END}\nafter\n")
    assert "old" not in page
