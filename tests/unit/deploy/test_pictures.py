"""The pictures of README are what the script makes of the results."""

from __future__ import annotations

import re

import pytest

from deploy.pictures import make

AGAIN = "run: python deploy/pictures/make.py"


def test_plot_shows_the_numbers_of_the_results() -> None:
    drawn = make.first_token()
    assert (make.FOLDER / "first-token.svg").read_text() == drawn, AGAIN
    measured = make.measured(make.RESULTS.read_text())
    shown = [f">{number:,.0f}<" for row in measured.values() for number in row]
    assert len(shown) == len(make.SERIES) * len(make.PROMPTS)
    assert not [number for number in shown if number not in drawn]


def test_results_without_the_entry_of_the_plot_are_refused() -> None:
    with pytest.raises(ValueError, match="On an H200"):
        make.measured("| computed, vLLM alone | 33 |")


def test_terminal_shows_what_the_command_prints() -> None:
    """Its words: their places and colours are those of the installed rich."""
    stored, drawn = (make.FOLDER / "top.svg").read_text(), make.top()
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", each) for each in (stored, drawn)]
    assert texts[0] == texts[1], AGAIN
    assert len(texts[0]) > 10
    assert "url(http" not in stored.replace('"', "")
