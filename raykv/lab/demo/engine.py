"""One vLLM engine with RayKV, as the demo uses it: start, ask, forget, shut down.

Importing this module is light: vLLM is imported once an engine starts.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raykv.base.errors import RayKVError
from raykv.lab.demo.report import DemoAsk, DemoTokens, Phase
from raykv.serve.models import cache_root

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from raykv.lab.demo.prompts import Prompt, Step

_POLL_S = 0.05
_RESET_TIMEOUT_S = 20.0
_SHUTDOWN_TIMEOUT_S = 15.0  # vLLM's own 5 s kill EngineCore while it waits 5 s for its workers


class EngineBusyError(RayKVError):
    """vLLM did not drop its prefix cache in time."""


class EngineStartError(RayKVError):
    """vLLM did not start; what it said is in the log file."""


@dataclass(frozen=True)
class Setup:
    """What differs between the real model and the tiny one."""

    model: Path
    name: str
    caveat: str
    engine_options: dict[str, Any]
    sampling_options: dict[str, Any]
    make_prompts: Callable[[Any], list[Prompt]]


class DemoEngine:
    """A running engine; its EngineCore is a process of its own.

    A process has one set of vLLM's counters, that of the engine which it started last: an engine
    is not asked any more once there is a later one.
    """

    def __init__(self, setup: Setup, raykv: Mapping[str, Any]) -> None:
        """Start it.

        Args:
            setup: Which model, and how it is asked.
            raykv: Settings of RayKV.

        Raises:
            EngineStartError: vLLM refused to.
        """
        self._setup = setup
        try:
            self._llm = _llm(setup, raykv)
        except (RuntimeError, ValueError) as error:
            raise EngineStartError(f"vLLM did not start ({error}); see {log_path()}") from error

    def shut_down(self) -> None:
        """End its processes."""
        self._llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)

    def prompts(self) -> list[Prompt]:
        """What this model is asked."""
        return self._setup.make_prompts(self._llm)

    def ask(self, step: Step) -> DemoAsk:
        """Ask once; says where the tokens of the prompt came from."""
        prompt = step.prompt
        before = self._sources()
        output = self.generate(
            prompt.token_ids, skip_reading_prefix_cache=step.phase is Phase.RECOMPUTE
        )
        sources = self._sources().since(before)
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        return DemoAsk(
            document=prompt.document,
            question=prompt.question,
            phase=step.phase,
            round=step.round,
            prompt_tokens=len(prompt.token_ids),
            sources=sources,
            ttft_s=output.metrics.first_token_latency,
            token_ids=token_ids,
            answer=completion.text.strip() or " ".join(map(str, token_ids)),
        )

    def generate(self, token_ids: Sequence[int], **options: Any) -> Any:
        """vLLM's output for one prompt, greedy; `options` are vLLM's, for this prompt only."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, **self._setup.sampling_options, **options)
        prompt = {"prompt_token_ids": list(token_ids)}
        return self._llm.generate(prompt, sampling, use_tqdm=False)[0]

    def forget_prefixes(self) -> None:
        """Drop vLLM's own prefix cache; RayKV has to have stored what it is to keep.

        Raises:
            EngineBusyError: vLLM does not let go of it.
        """
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise EngineBusyError(
                    f"vLLM kept its prefix cache for {_RESET_TIMEOUT_S:.0f} s: blocks are in use"
                )
            time.sleep(_POLL_S)

    def _sources(self) -> DemoTokens:
        """Where tokens came from, by vLLM's counters since the engine started."""
        counts: Counter[str] = Counter()
        for metric in self._llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_by_source":
                counts[metric.labels["source"]] += metric.value
        return DemoTokens(
            computed=counts["local_compute"],
            prefix_cache=counts["local_cache_hit"],
            raykv=counts["external_kv_transfer"],
        )


def log_path() -> Path:
    """Where the engines' and Ray's output goes."""
    return cache_root() / "demo.log"


def _llm(setup: Setup, raykv: Mapping[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=str(setup.model),
        dtype="float32",  # in bf16 another split of the prefill may change a token
        enforce_eager=True,
        disable_log_stats=False,  # or there is no time to first token and no counter
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="RayKVConnector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(raykv),
        ),
        **setup.engine_options,
    )
