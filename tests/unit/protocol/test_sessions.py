"""What is said of sessions, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raykv.base.errors import MessageError
from raykv.base.ids import MAX_KEY_BYTES
from raykv.protocol.columns import MAX_ROWS, Keys
from raykv.protocol.framing import receive
from raykv.protocol.sessions import SessionNews, SessionWord


def received(*fields: Any) -> SessionNews:
    return receive(msgspec.msgpack.encode(fields), SessionNews, "an engine", "this test")


@pytest.mark.parametrize(
    "fields",
    [
        ("", SessionWord.USED),
        ("s" * 129, SessionWord.USED),
        ("s", SessionWord.USED, Keys.of([bytes(MAX_KEY_BYTES + 1)])),
        ("s", SessionWord.USED, Keys.of([b"k"] * (MAX_ROWS + 1))),
        ("s", SessionWord.USED, Keys(), 1.0),
        ("s", SessionWord.PAUSED),
        ("s", SessionWord.PAUSED, Keys(), -1.0),
        ("s", SessionWord.PAUSED, Keys(), float("nan")),
        ("s", SessionWord.PAUSED, Keys(), 1e9),
        ("s", SessionWord.PAUSED, Keys(), 1.0, 10),
        ("s", SessionWord.PAUSED, Keys(), 1.0, -1),
        ("s", 9),
    ],
)
def test_news_that_cannot_be_meant_is_refused(fields: tuple[Any, ...]) -> None:
    assert received("s", SessionWord.PAUSED, Keys.of([b"k"]), 1.0, 9).keys == [b"k"]
    with pytest.raises(MessageError):
        received(*fields)
