"""Has prompts computed by prefill engines and hands the requests on to decode engines.

                a prefill fails: lost, or late
   (asked) ──────────────────────────────────────► (left alone)
      ▲                                                 │
      └─────────────────────────────────────────────────┘
                a prompt of one token is answered

While the prefill engines are left alone no request waits for them: the decode engines compute. The
prefill engine answers first, then the decode engine is asked: by then all chunks are announced or
about to be, and those that are not stored yet are waited for in the decode engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from raykv.base import deadlines
from raykv.serve.disaggregated.requests import Course, Handover, Split, probe, split
from raykv.serve.http.exchange import Head, HttpRequest, Pieces, whole
from raykv.serve.http.ingress import GONE, Backend, collected
from raykv.serve.http.metrics import ReplicaMetrics

logger = logging.getLogger("ray.serve")

# For prefill engines that have failed to answer a prompt of one token: busy ones may have a few
# long prompts before it. Meanwhile the decode engines compute all prompts.
PREFILL_PROBE_S = 5.0

COURSE_HEADER = b"x-raykv-prefill"
"""In answers: a `Course`."""


class DisaggregatedBackend:
    """A `Backend` of prefill and decode engines of one model. For one event loop.

    Args:
        model: What requests call it.
        prefill: Prefill engines.
        decode: Decode engines.
        handover: Which prompts are handed over, and for how long a prefill is waited for.
        count: Called with the course of each request's prompt.
    """

    def __init__(
        self,
        model: str,
        prefill: Backend,
        decode: Backend,
        handover: Handover,
        count: Callable[[Course], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._prefill = prefill
        self._decode = decode
        self._handover = handover
        self._count = count
        # Waits for the prefill engines to answer again; None: they are asked.
        self._return: asyncio.Task[None] | None = None
        self._has_logged_refusal = False

    async def metrics(self) -> Sequence[ReplicaMetrics]:
        return await collected([self._prefill, self._decode])

    async def answer(self, request: HttpRequest) -> Pieces:
        forms = split(request, self._handover)
        course = None
        if not request.known:
            # Else its prompt was computed when it began.
            course = await self._course(forms)
            self._count(course)
        form = forms.decode if course is Course.PREFILLED else forms.plain
        async with aclosing(self._decode.answer(form)) as pieces:
            async for piece in pieces:
                yield _marked(piece, course) if course and isinstance(piece, Head) else piece

    async def _course(self, forms: Split) -> Course:
        """Have the prompt computed if it should be; raises only when it is cancelled."""
        if forms.prefill is None:
            return forms.reason
        if self._return is not None:
            return Course.SKIPPED
        deadline_s = self._handover.prefill_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                head, _ = await whole(self._prefill.answer(forms.prefill))
        except TimeoutError:
            self._leave_alone(f"no answer within {deadline_s} s")
            return Course.LATE
        except Exception as error:
            self._leave_alone(_reason(error))
            return Course.LOST
        if head.status == 200:
            return Course.PREFILLED
        if not self._has_logged_refusal:
            self._has_logged_refusal = True
            logger.warning(
                "a prefill engine of %s answered with status %d: the decode engine computes the "
                "prompt, or says what is wrong with the request (logged once)",
                self._model,
                head.status,
            )
        return Course.REFUSED

    def _leave_alone(self, reason: str) -> None:
        if self._return is not None:
            return
        logger.warning(
            "prefill engines of %s: %s. Decode engines compute all prompts until one answers again",
            self._model,
            reason,
        )
        # watched: what it calls says False for all errors
        self._return = asyncio.create_task(self._await_return())

    async def _await_return(self) -> None:
        while not await self._answers():
            await asyncio.sleep(deadlines.AGAIN_S)
        logger.warning("prefill engines of %s answer again", self._model)
        self._return = None

    async def _answers(self) -> bool:
        """Whether a prefill engine lives; refusing a prompt is a sign of life."""
        try:
            async with asyncio.timeout(PREFILL_PROBE_S):
                head, _ = await whole(self._prefill.answer(probe(self._model)))
                return head.status < 500
        except Exception as error:
            logger.debug("no prefill engine of %s answers: %s", self._model, _reason(error))
            return False


def _reason(error: Exception) -> str:
    return "one has died" if isinstance(error, GONE) else f"{type(error).__name__}: {error}"


def _marked(head: Head, course: Course) -> Head:
    return Head(head.status, [*head.headers, (COURSE_HEADER, course.encode())])
