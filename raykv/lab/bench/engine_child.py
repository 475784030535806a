"""Runs a real vLLM engine in a process of its own and obeys JSON commands on standard input.

`python -m raykv.lab.bench.engine_child`: the first line describes the engine, each further line is
a command. Answers are JSON lines on the descriptor that was standard output at the start;
everything that vLLM prints goes to standard error. `engine.py` is the parent's side.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO


def main(kind: type[ChildEngine]) -> None:
    """Start the engine that the first line describes, then serve commands until "exit"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers, kind)


def serve(commands: TextIO, answers: TextIO, kind: type[ChildEngine]) -> None:
    """Do as `main`, with these streams."""
    config = json.loads(commands.readline())
    engine = kind(config)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        if name == "exit":
            break
        try:
            answer = {"answer": getattr(engine, name)(**command)}
        except Exception as error:  # noqa: BLE001 - reported to the parent
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    engine.shut_down()
    print(json.dumps({"ended": True}), file=answers, flush=True)


KV_BYTES = 1 << 30
"""Size of an engine's KV cache; on CPUs `engine.py` sets the same by the environment."""

RESET_TRIES, RESET_PAUSE_S = 1000, 0.02
"""Copies that have just ended may still hold blocks, for up to 20 s on a busy machine."""

GPU_SHARE = 0.05
"""Share of a GPU's memory that must be free when an engine starts: several share one GPU."""


def room_on(is_gpu: bool, config: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments for an engine on a GPU that gives no share of its memory.

    By default vLLM takes nearly all memory of a GPU, and does not start if that is not free. With
    a fixed size it also does not measure memory, which fails while another engine starts or ends.
    """
    if not is_gpu or "gpu_memory_utilization" in config:
        return {}
    return {"gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": KV_BYTES}


def greedy(
    max_tokens: int, params: dict[str, Any] | None, *, ignore_eos: bool = True, **more: Any
) -> Any:
    """Return vLLM's sampling parameters for greedy tokens, with parameters for the connector."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        detokenize=False,
        ignore_eos=ignore_eos,
        extra_args={"kv_transfer_params": params} if params else None,
        **more,
    )


class ChildEngine:
    """The commands."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.platforms import current_platform

        # Requests of `serve` so far.
        self._served = 0
        connector = config.pop("connector", None)
        if (raykv := config.pop("raykv", None)) is not None:
            connector = {"kv_connector": "RayKVConnector", "kv_connector_extra_config": raykv}
        self._llm = LLM(
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=connector and KVTransferConfig(kv_role="kv_both", **connector),
            **{
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "dtype": "float32",
                **room_on(bool(current_platform.is_cuda()), config),
                **config,
            },
        )

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 6, **how: Any
    ) -> list[dict[str, Any]]:
        """Return greedy tokens of each prompt, how many were cached, and the time to the first.

        "transfer" has the connector's addition to the answer.
        """
        return [
            {
                "id": output.request_id,
                "transfer": output.kv_transfer_params,
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "reason": output.outputs[0].finish_reason,
                "ttft_s": output.metrics.first_token_latency,
            }
            for output in self._generate(prompts, max_tokens, **how)
        ]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        lora: Any = None,
        *,
        ignore_eos: bool = True,
        **of_request: Any,
    ) -> list[Any]:
        """`of_request` has further parts of each prompt for vLLM."""
        sampling = greedy(max_tokens, params, ignore_eos=ignore_eos)
        requests: list[Any] = [{"prompt_token_ids": prompt, **of_request} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(
            requests, sampling, use_tqdm=False, lora_request=lora
        )
        return outputs

    def serve(
        self,
        requests: list[dict[str, Any]],
        params: dict[str, Any] | None = None,
        **of_request: Any,
    ) -> dict[str, Any]:
        """Serve requests together, and abort some after a number of steps of the engine.

        `of_request` has further arguments of each request for vLLM.

        An output has its greedy tokens, their logprobs, and by how much each was likelier than the
        next one. An aborted request has the reason "abort" alone.
        """
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        found: dict[str, dict[str, Any]] = {}
        aborts: dict[str, int] = {}
        began = time.monotonic()
        for number, request in enumerate(requests):
            self._served += 1
            request_id = f"{number}-{self._served}"
            final = RequestOutputKind.FINAL_ONLY
            sampling = greedy(request["max_tokens"], params, logprobs=2, output_kind=final)
            prompt = {"prompt_token_ids": request["prompt"]}
            engine.add_request(request_id, prompt, sampling, **of_request)
            found[request_id] = {"reason": "abort"}
            if request.get("abort_after_steps"):
                aborts[request_id] = request["abort_after_steps"]
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = _answer(output, time.monotonic() - began)
            steps += 1
            gone = [request_id for request_id, after in aborts.items() if after == steps]
            engine.abort_request(gone)
        return {
            "outputs": list(found.values()),
            "preemptions": self.counters().get("vllm:num_preemptions", 0.0),
        }

    def timed(self, batches: list[list[list[int]]], max_tokens: int = 1) -> dict[str, float]:
        """Serve batches of prompts one after the other.

        Returns the seconds in all, and how many tokens came out of a cache.
        """
        took_s, outputs = self._served_batches(batches, max_tokens)
        return {"seconds": took_s, "cached": sum(each.num_cached_tokens or 0 for each in outputs)}

    def _served_batches(
        self, batches: list[list[list[int]]], max_tokens: int
    ) -> tuple[float, list[Any]]:
        began = time.perf_counter()
        outputs = [each for some in batches for each in self._generate(some, max_tokens)]
        return time.perf_counter() - began, outputs

    def reset(self, *, connector: bool = False) -> bool:
        """Drop vLLM's prefix cache, and with `connector` RayKV's chunks of this model too."""
        for _ in range(RESET_TRIES):
            if self._llm.reset_prefix_cache(reset_connector=connector):
                return True
            if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
                # Nothing else makes a step, and an aborted request may have to end its load.
                self._llm.llm_engine.step()
            time.sleep(RESET_PAUSE_S)
        return False

    def running(self) -> dict[str, Any]:
        """Return vLLM's choices: the model runner, CUDA graphs, and so on.

        Choices of workers show only if EngineCore runs in this process.
        """
        import vllm
        from vllm.platforms import current_platform

        from raykv.vllm.internals.engine import configuration_of

        config = configuration_of(self._llm.llm_engine)
        return {
            "vllm": vllm.__version__,
            "device": current_platform.device_type,
            "device_name": current_platform.get_device_name(),
            "second_runner": bool(config.use_v2_model_runner),
            "graphs": config.compilation_config.cudagraph_mode.name,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "block_size": config.cache_config.block_size,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters by name and source."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source", "")
                found[f"{metric.name}{{{source}}}" if source else metric.name] = float(value)
        return found

    def shut_down(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()


def _answer(output: Any, seconds: float) -> dict[str, Any]:
    (only,) = output.outputs
    ranked = [
        sorted((each.logprob for each in step.values()), reverse=True)
        for step in only.logprobs or []
    ]
    return {
        "tokens": list(only.token_ids),
        "logprobs": [some[0] for some in ranked],
        "gaps": [some[0] - some[1] for some in ranked],
        "cached": output.num_cached_tokens or 0,
        "reason": only.finish_reason or "",
        "seconds": seconds,
    }


if __name__ == "__main__":
    main(ChildEngine)
