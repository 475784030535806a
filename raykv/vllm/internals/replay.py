"""Has an engine continue an answer that another engine has begun.

    generate ──► the request, known to the front end as the client sent it
                     │ the front end reads the known deltas, as if the engine had made them
                     ▼
                 the engine gets prompt and known tokens as one prompt, and makes the rest

The state of detokenizer, stop strings and parsers is right because they read all of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from copy import copy
from importlib.metadata import entry_points
from typing import Any

import msgspec

from raykv.base import deadlines
from raykv.vllm.transcript import CURRENT, Delta, Transcript, why_not

logger = logging.getLogger("raykv")

TOGETHER = 32
"""Tokens that are told at once of an answer that is no stream; deltas that are replayed at once."""

_ABORTED = "abort"
_ALIVE = 20
"""So many answers, in two seconds or more, do not come from an engine that ends."""


def continue_answers(engine: Any) -> None:
    """Record the deltas of every answer that `engine`, vLLM's `AsyncLLM`, makes from now on.

    If an answer's transcript has known deltas, the engine makes what comes behind them.
    """
    try:
        _Replay(engine)
    except AttributeError as error:
        logger.warning("answers end with their replica: vLLM has changed (%s)", error)


class _Replay:
    """See `continue_answers`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._generate, self._add = engine.generate, engine._add_request
        self._why_not = _why_never(engine.vllm_config)
        engine.generate, engine._add_request = self._generating, self._adding

    async def _generating(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        from vllm.sampling_params import RequestOutputKind

        transcript = CURRENT.get()
        if transcript is not None:
            transcript.begin(self._why_not or why_not(sampling_params))
            if transcript.known and transcript.why_not:
                raise _refused(transcript.why_not)
        is_kept = transcript is not None and not transcript.why_not
        is_whole = is_kept and sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        if is_whole:
            # Else no delta is seen before the last one; fewer of them cost less.
            sampling_params = copy(sampling_params)
            sampling_params.output_kind = RequestOutputKind.DELTA
            sampling_params.stream_interval = max(TOGETHER, sampling_params.stream_interval or 1)
        whole = None
        outputs = self._generate(prompt, sampling_params, request_id, **more)
        async with aclosing(self._stepwise(outputs, transcript if is_kept else None)) as deltas:
            async for output in deltas:
                if not is_whole:
                    yield output
                elif whole is None:
                    whole = output
                else:
                    whole.add(output, aggregate=True)
        if whole is not None:
            yield whole

    async def _stepwise(
        self, outputs: AsyncGenerator[Any, None], transcript: Transcript | None
    ) -> AsyncGenerator[Any, None]:
        """The outputs, behind those of what is known; each delta is in the transcript before it is
        read.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            async with aclosing(outputs):
                async for output in outputs:
                    made = output.outputs[0]
                    if made.finish_reason == _ABORTED:
                        await self._outlive()
                    elif transcript is not None:
                        for replayed in transcript.replayed_outputs():
                            # Front ends take them from the first output.
                            replayed.num_cached_tokens = output.num_cached_tokens
                            replayed.num_cache_creation_tokens = output.num_cache_creation_tokens
                            yield replayed
                        ids = tuple(made.token_ids)
                        transcript.add(Delta(ids, made.finish_reason, made.stop_reason))
                    yield output
        except (EngineDeadError, EngineGenerateError):
            await self._leave()
            raise

    async def _outlive(self) -> None:
        """Return if the engine lives: one that is told to end aborts its requests first."""
        give_up_at, num_answers = time.monotonic() + deadlines.JOIN_S, 0
        while not self._engine.errored and time.monotonic() < give_up_at:
            try:
                async with asyncio.timeout(deadlines.PROMPT_S):
                    is_paused = await self._engine.is_paused()
            except Exception:
                # It ends, or is busy.
                logger.debug("an engine that has aborted a request does not answer", exc_info=True)
            else:
                num_answers += 1
                if is_paused or num_answers == _ALIVE:
                    return
            await asyncio.sleep(deadlines.LOOK_S)
        await self._leave()

    async def _leave(self) -> None:
        """Return if the engine lives.

        With a dead one the process ends, which callers understand better than an error: another
        replica continues the answer.
        """
        if self._engine.errored:
            await asyncio.sleep(deadlines.LEAVE_S)

    async def _adding(self, request: Any, prompt: Any, parent: Any, index: int, queue: Any) -> None:
        """As vLLM's `_add_request`; the front end reads what is known, the engine gets the rest.

        vLLM's bound of waiting requests does not count for it: it was admitted when it began.
        """
        transcript = CURRENT.get()
        if transcript is not None and (
            request.prompt_token_ids is None or request.prompt_embeds is not None
        ):
            transcript.refuse("its prompt has embeddings")
            if transcript.known:
                raise _refused(transcript.why_not)
        if transcript is None or not transcript.known:
            await self._add(request, prompt, parent, index, queue)
            return
        processor = self._engine.output_processor
        processor.add_request(request, prompt, parent, index, queue)
        try:
            await self._read_known(request.request_id, transcript, queue)
        except BaseException:
            processor.abort_requests([request.request_id], internal=True)
            raise
        if transcript.is_over:
            return
        known = [*request.prompt_token_ids]
        for delta in transcript.known:
            known += delta.token_ids
        # The next output is the engine's first one, which says what was loaded.
        processor.request_states[request.request_id].is_prefilling = True
        params = copy(request.sampling_params)
        num_known = len(known) - len(request.prompt_token_ids)
        params.max_tokens -= num_known
        params.min_tokens = max(0, params.min_tokens - num_known)
        rest = msgspec.structs.replace(request, prompt_token_ids=known, sampling_params=params)
        await self._engine.engine_core.add_request_async(rest)

    async def _read_known(self, request_id: str, transcript: Transcript, queue: Any) -> None:
        """Have the front end read what is known, with pauses for the other requests."""
        processor = self._engine.output_processor
        for number, delta in enumerate(transcript.known, 1):
            with _untraced(processor):
                processor.process_outputs([_output(request_id, delta)])
            if not processor.has_request(request_id):
                # It was whole: its last output is read like an engine's, but was told before.
                transcript.is_over = True
                return
            output = queue.get_nowait()
            if output is not None:
                transcript.replayed.append(output)
            if number % TOGETHER == 0:
                await asyncio.sleep(0)


def _why_never(config: Any) -> str:
    """Why no answer of an engine can be continued, with its `VllmConfig`; empty if some can."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    if config.watermark_config is not None:
        return "this server marks its answers"
    if config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP):
        return "this server has logits processors of its own"
    return ""


@contextmanager
def _untraced(processor: Any) -> Iterator[None]:
    """No span for a request that no engine has seen."""
    was, processor.tracing_enabled = processor.tracing_enabled, False
    try:
        yield
    finally:
        processor.tracing_enabled = was


def _refused(reason: str) -> Exception:
    """vLLM answers 400, or has an error event in a stream."""
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(f"an answer that was begun can't go on here: {reason}")
    return error


def _output(request_id: str, delta: Delta) -> Any:
    """As the engine gave it to the front end, which finds stop strings itself."""
    from vllm.v1.engine import FINISH_REASON_STRINGS, EngineCoreOutput, FinishReason

    reason = None
    if delta.finish_reason is not None and not isinstance(delta.stop_reason, str):
        reason = FinishReason(FINISH_REASON_STRINGS.index(delta.finish_reason))
    ids = list(delta.token_ids)
    stop = delta.stop_reason if reason is not None else None
    return EngineCoreOutput(request_id, ids, finish_reason=reason, stop_reason=stop)
