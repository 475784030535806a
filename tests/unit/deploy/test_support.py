"""The page of what works with which model is what the tests prove, no more and no less."""

from __future__ import annotations

import pytest

from deploy import support
from deploy.support import Proof


def test_page_of_support_is_what_the_tests_prove() -> None:
    made = support.page(support.collect())
    assert support.TARGET.read_text(encoding="utf-8") == made, "run: python deploy/support.py"


def test_cell_names_the_versions_that_some_test_runs_on() -> None:
    proofs = [
        Proof("load", "llama", on_both=False),
        Proof("load", "llama", on_both=True),
        Proof("load", "mistral", on_both=False),
    ]
    (row,) = [line for line in support.page(proofs).splitlines() if line.startswith("| load |")]
    assert row.split(" | ")[1:3] == ["both", "0.32"]
    assert set(row.split("|")[4:]) == {" ", ""}


@pytest.mark.parametrize("wrong", [("loads", "llama"), ("load", "lama")])
def test_feature_or_model_that_nobody_knows_is_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"zoo: {wrong[0] if wrong[0] == 'loads' else 'lama'}"):
        support.page([Proof(*wrong, on_both=False)])
