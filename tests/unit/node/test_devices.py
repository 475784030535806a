"""Which GPUs a NodeActor sees, whatever Ray has set."""

from __future__ import annotations

import os

import pytest

from raykv.node.devices import VISIBLE, see_all_gpus


@pytest.mark.parametrize(
    "value", ["", "0", "1,2", "GPU-00112233", "-1", "NoDevFiles", "MIG-1111", None]
)
def test_choice_of_gpus_is_dropped_but_for_parts_which_are_seen_by_their_names_only(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VISIBLE, value)
    see_all_gpus()
    assert os.environ.get(VISIBLE) == (value if value == "MIG-1111" else None)
