"""As much of a handle of a Serve deployment as the ingress uses."""

from __future__ import annotations

import asyncio
from typing import Any

from raykv.serve.http.exchange import HttpRequest


class Pieces:
    """What a call of a handle returns."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = list(pieces)
        self.is_cancelled = False
        self.is_taken = asyncio.Event()

    async def _to_object_ref_gen(self) -> object:
        await self.is_taken.wait()
        return object()

    def cancel(self) -> None:
        self.is_cancelled = True

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Any:
        if not self.pieces:
            raise StopAsyncIteration
        return self.pieces.pop(0)


class Handle:
    """A handle of a Serve deployment whose calls all return `pieces`."""

    def __init__(self, pieces: Pieces) -> None:
        self.handle_http = self
        self._pieces = pieces

    def options(self, **options: Any) -> Handle:
        del options
        return self

    def remote(self, request: HttpRequest) -> Pieces:
        del request
        return self._pieces
