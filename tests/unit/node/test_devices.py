"""Which GPUs a NodeActor sees, whatever Ray has set."""

from __future__ import annotations

import os

import pytest

from raykv.node.devices import VISIBLE, see_all_gpus


@pytest.mark.parametrize("value", ["", "0", "1,2", "GPU-00112233", "-1", "NoDevFiles"])
def test_choice_of_gpus_is_dropped(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VISIBLE, value)
    see_all_gpus()
    assert VISIBLE not in os.environ


def test_parts_of_a_gpu_are_seen_by_their_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "MIG-1111")
    see_all_gpus()
    assert os.environ[VISIBLE] == "MIG-1111"


def test_nothing_is_done_when_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    see_all_gpus()
    assert VISIBLE not in os.environ
