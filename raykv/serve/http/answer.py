"""Has another replica continue an answer whose replica dies; the client sees a pause.

    replica 1 ── head, pieces 1 to 5, deltas 1 to 7 ──► passed on, deltas kept     (dies)
    replica 2 ◄── the request, deltas 1 to 7
              ── head, pieces 1 to 5, then 6, … ──► the first five dropped, the rest passed on

The second replica's front end reads the known deltas like the first one's, so it sends the same
pieces. Where no other replica can continue, the first one says so (`MadePiece.why_not`): then the
answer ends with that reason, or begins anew if nothing of it has been passed on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raykv.serve.http import exchange
from raykv.vllm.transcript import Deltas

ROUTES = frozenset({exchange.COMPLETIONS, exchange.CHAT})
"""Routes whose answers are continued. Their events differ between replicas in `_SAME` alone."""

_DATA, _END = b"data: ", b"\n\n"

_COMMENT = b":"
"""Begins what keeps a connection alive, at times of its own."""

_SAME = ("id", "created")
"""Fields of an event that the first one's replica has chosen."""

MOST_TOKENS = 1 << 17
"""Of an answer that is continued: a mebibyte is kept of it at most."""


class NotContinuedError(Exception):
    """No other replica can continue the answer of one that has died; the text says why."""


class ContinuedAnswer:
    """What is known of one answer, however many replicas make it. Pure."""

    def __init__(self, request: exchange.HttpRequest) -> None:
        self._request = request
        # Passed on with what comes behind it: its length is that of this replica's body.
        self._head: exchange.Head | None = None
        self._is_head_passed = False
        self._first = b""
        self._num_passed = 0
        self._deltas = Deltas()
        self._why_not = ""
        # Of the replica that makes it now.
        self._is_again = self._is_refused = False
        self._num_heard = 0

    @property
    def num_tokens(self) -> int:
        """That are known."""
        return len(self._deltas.token_ids)

    def again(self) -> exchange.HttpRequest:
        """What another replica is asked.

        Raises:
            NotContinuedError: some of the answer was passed on, and no other replica can continue.
        """
        self._is_again, self._is_refused, self._num_heard = True, False, 0
        why_not = self._reason()
        if not why_not and self._num_passed and not self.num_tokens:
            why_not = "its tokens are not known"
        if not why_not:
            return replace(self._request, known=tuple(self._deltas))
        if self._num_passed:
            raise NotContinuedError(
                f"the replica that was answering has died, and no other can continue: {why_not}; "
                "ask again"
            )
        self._deltas = Deltas()
        return self._request

    def _reason(self) -> str:
        """Why no other replica can continue; empty if one can."""
        if self._request.path not in ROUTES:
            return "only completions and chats are continued"
        if self.num_tokens > MOST_TOKENS:
            return f"it has more than {MOST_TOKENS} tokens"
        return self._why_not

    def heard(self, piece: exchange.Piece) -> Sequence[exchange.Head | bytes]:
        """What is passed on now that a replica has sent a piece.

        Raises:
            NotContinuedError: the replica refuses to continue.
        """
        if isinstance(piece, exchange.Head):
            if self._head is None or not self._is_head_passed:
                self._head = piece
            else:
                self._is_refused = piece.status != self._head.status
            return []
        if isinstance(piece, exchange.MadePiece):
            self._why_not = self._why_not or piece.why_not
            if not self._reason():
                self._deltas.add(piece.deltas)
        body = exchange.body_of(piece)
        if not body:
            return []
        is_known = self._num_heard < self._num_passed
        if self._is_refused or (is_known and "error" in _event(body)):
            said = body.decode(errors="replace")
            raise NotContinuedError(f"the next replica refuses to continue: {said[:500]}")
        if body.startswith(_COMMENT):
            return self._behind_head(body)
        self._num_heard += 1
        if is_known:
            return []
        self._num_passed += 1
        if self._is_again and self._first:
            return self._behind_head(_with_same(body, self._first))
        self._first = self._first or body
        return self._behind_head(body)

    def ended(self) -> Sequence[exchange.Head | bytes]:
        """What is passed on now that the replica has no more.

        Raises:
            NotContinuedError: it has less than was passed on.
        """
        if self._num_heard < self._num_passed:
            raise NotContinuedError("the next replica made another answer: ask again")
        return self._behind_head()

    def _behind_head(self, *bodies: bytes) -> Sequence[exchange.Head | bytes]:
        if self._is_head_passed or self._head is None:
            return bodies
        self._is_head_passed = True
        return [self._head, *bodies]


def _with_same(piece: bytes, first: bytes) -> bytes:
    """An event, with what the first one said of the whole answer."""
    body, known = _event(piece), _event(first)
    same = {name: known[name] for name in _SAME if name in known and name in body}
    if not same:
        return piece
    text = json.dumps({**body, **same}, ensure_ascii=False, separators=(",", ":"))
    return _DATA + text.encode() + _END


def _event(piece: bytes) -> dict[str, Any]:
    """Its JSON; empty for what is no event with an object."""
    try:
        body = exchange.parsed(piece.removeprefix(_DATA)) if piece.startswith(_DATA) else None
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {}
