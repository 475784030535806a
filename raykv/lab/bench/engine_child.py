"""Runs a real vLLM engine in a process of its own and obeys JSON commands on standard input.

`python -m raykv.lab.bench.engine_child`: the first line describes the engine, each further line is
a command. Answers are JSON lines on the descriptor that was standard output at the start;
everything that vLLM prints goes to standard error. For benchmarks and tests: `engine.py` is the
parent's side.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, TextIO


def main() -> None:
    """Start the engine that the first line describes, then serve commands until "exit"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


def serve(commands: TextIO, answers: TextIO) -> None:
    """What `main` does, on whatever commands come on and answers go to."""
    config = json.loads(commands.readline())
    engine = ChildEngine(config)
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


def transfer_config(raykv: dict[str, Any] | None, connector: dict[str, Any] | None) -> Any:
    """vLLM's `KVTransferConfig`: RayKV's with its settings, or that of another connector."""
    from vllm.config import KVTransferConfig

    if raykv is not None:
        connector = {"kv_connector": "RayKVConnector", "kv_connector_extra_config": raykv}
    return None if connector is None else KVTransferConfig(kv_role="kv_both", **connector)


KV_BYTES = 1 << 30
"""Of an engine's KV cache on a GPU, and of one on CPUs by the environment that `engine.py` sets."""

GPU_SHARE = 0.05
"""Of a GPU's memory that must be free when an engine starts: several share one."""


def room_on(is_gpu: bool, config: dict[str, Any]) -> dict[str, Any]:
    """What is added to the arguments of an engine that does not size its KV cache by a share.

    vLLM gives one engine nearly all of a GPU, and refuses to start where that is not free. With the
    size told it does not measure either, which fails while another engine starts or ends.
    """
    if not is_gpu or "gpu_memory_utilization" in config:
        return {}
    return {"gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": KV_BYTES}


class ChildEngine:
    """The commands."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        # Requests of `serve` so far.
        self._served = 0

        watches_hooks = config.pop("watch_hooks", False)
        transfer = transfer_config(config.pop("raykv", None), config.pop("connector", None))
        if "kv_events_config" in config:
            from vllm.config import KVEventsConfig

            config["kv_events_config"] = KVEventsConfig(**config["kv_events_config"])
        if watches_hooks:
            from raykv.lab.bench import hooks

            hooks.watch()
        self._llm = LLM(
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=transfer,
            **{
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "dtype": "float32",
                **room_on(bool(current_platform.is_cuda()), config),
                **config,
            },
        )

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 6,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        adapter: dict[str, Any] | None = None,
        picture: list[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy tokens of each prompt, how many of its tokens were cached, time to the first.

        "transfer" is what the connector has added to the answer. Each prompt comes with a `picture`
        of one color, of red, green and blue.
        """
        outputs = self._generate(prompts, max_tokens, params, salt, adapter, picture)
        return [
            {
                "id": output.request_id,
                "transfer": output.kv_transfer_params,
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "reason": output.outputs[0].finish_reason,
                "ttft_s": output.metrics.first_token_latency,
            }
            for output in outputs
        ]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        adapter: dict[str, Any] | None = None,
        picture: list[int] | None = None,
    ) -> list[Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None if adapter is None else LoRARequest(**adapter)
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            detokenize=False,
            ignore_eos=True,
            extra_args=extra,
        )
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        if picture is not None:
            from PIL import Image

            media = {"image": Image.new("RGB", (32, 32), tuple(picture))}
            requests = [{**request, "multi_modal_data": media} for request in requests]
        if salt is not None:
            requests = [{**request, "cache_salt": salt} for request in requests]
        outputs: list[Any] = self._llm.generate(
            requests, sampling, use_tqdm=False, lora_request=lora
        )
        return outputs

    def serve(
        self,
        requests: list[dict[str, Any]],
        params: dict[str, Any] | None = None,
        kv_hints: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Work on requests together; some are cancelled after a number of steps of the engine.

        `kv_hints` are vLLM's, as an orchestrator would write them.

        An output has its greedy tokens, their logprobs, and by how much each was likelier than the
        next one. What was taken back comes with the reason "abort".
        """
        import msgspec
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.kv_hints import KvHintsEnvelope

        engine = self._llm.llm_engine
        found: dict[str, dict[str, Any]] = {}
        aborts: dict[str, int] = {}
        began = time.monotonic()
        hints = None if kv_hints is None else msgspec.convert(kv_hints, KvHintsEnvelope)
        for number, request in enumerate(requests):
            self._served += 1
            request_id = f"{number}-{self._served}"
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                detokenize=False,
                ignore_eos=True,
                logprobs=2,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            prompt = {"prompt_token_ids": request["prompt"]}
            engine.add_request(request_id, prompt, sampling, kv_hints=hints)
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
        """Serve batches of prompts one after the other; seconds in all, and per output token, and
        how many tokens came out of a cache.
        """
        took_s = 0.0
        num_cached = 0
        decode_s: list[float] = []
        for prompts in batches:
            began = time.perf_counter()
            outputs = self._generate(prompts, max_tokens)
            took_s += time.perf_counter() - began
            for output in outputs:
                num_cached += output.num_cached_tokens or 0
                if max_tokens > 1:
                    decode_s.append(_seconds_per_token(output, max_tokens))
        return {
            "seconds": took_s,
            "seconds_per_token": fmean(decode_s) if decode_s else 0.0,
            "cached": num_cached,
        }

    def decode_beside(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        arrivals: list[list[int]],
        pace_s: float,
    ) -> dict[str, Any]:
        """Answer prompts, and from the time when all answers have begun have others arrive.

        Each of the others wants one token; those that have not arrived when the answers end are
        left out. Told are seconds per token of the answers, the seconds between any two tokens of
        an answer, how many others have arrived, and how many of their tokens came out of a cache.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        waiting, num_arrived, num_cached = deque(arrivals), 0, 0
        decode_s: list[float] = []
        last_at: dict[str, float] = {}
        gaps_s: list[float] = []

        def add(name: str, tokens: list[int], count: int) -> None:
            self._served += 1
            sampling = SamplingParams(
                temperature=0,
                max_tokens=count,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{name}-{self._served}", {"prompt_token_ids": tokens}, sampling)

        for tokens in prompts:
            add("answer", tokens, max_tokens)
        next_at = 0.0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                is_answer = output.request_id.startswith("answer")
                if is_answer:
                    if output.request_id in last_at:
                        gaps_s.append(now - last_at[output.request_id])
                    last_at[output.request_id] = now
                if output.finished and is_answer:
                    decode_s.append(_seconds_per_token(output, max_tokens))
                elif output.finished:
                    num_cached += output.num_cached_tokens or 0
            is_on = len(last_at) == len(prompts) and len(decode_s) < len(prompts)
            if waiting and is_on and time.monotonic() >= next_at:
                add("other", waiting.popleft(), 1)
                num_arrived += 1
                next_at = time.monotonic() + pace_s
        return {
            "seconds_per_token": fmean(decode_s),
            "gaps_s": gaps_s,
            "num_arrived": num_arrived,
            "cached": num_cached,
        }

    def hook_times(self) -> dict[str, Any]:
        """What was measured since the last call, if hooks are watched; see `hooks.py`."""
        from raykv.lab.bench import hooks

        return hooks.take()

    def abort_after(self, prompt: list[int], seconds: float) -> bool:
        """Add a request, let the engine work on it, and take it back."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
        engine = self._llm.llm_engine
        engine.add_request("to-abort", {"prompt_token_ids": prompt}, sampling)
        time.sleep(seconds)
        engine.abort_request(["to-abort"])
        while engine.has_unfinished_requests():
            engine.step()
        return True

    def reset(self, *, connector: bool = False) -> bool:
        """Drop vLLM's prefix cache, and with `connector` RayKV's chunks of this model too."""
        for _ in range(200):
            if self._llm.reset_prefix_cache(reset_connector=connector):
                return True
            if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
                # Nobody else takes a step: a request that was taken back may have to end its load.
                self._llm.llm_engine.step()
            time.sleep(0.02)
        return False

    def add_adapter(self, **adapter: Any) -> bool:
        """Load a LoRA adapter, as vLLM's server does on request."""
        from vllm.lora.request import LoRARequest

        return bool(self._llm.llm_engine.add_lora(LoRARequest(**adapter)))

    def reload_weights(self, path: str) -> bool:
        """Give the model the weights of another folder, while it runs."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return True

    def change_midway(self, prompt: list[int], path: str, max_tokens: int = 24) -> dict[str, Any]:
        """Work on a request, and give the model the weights of another folder meanwhile."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        engine.add_request("midway", {"prompt_token_ids": prompt}, sampling)
        outputs = engine.step()
        while not outputs or not outputs[0].outputs[0].token_ids:
            outputs = engine.step()
        self.reload_weights(path)
        while engine.has_unfinished_requests():
            outputs = engine.step() or outputs
        return {"tokens": list(outputs[0].outputs[0].token_ids)}

    def write_weights(self, factor: float) -> bool:
        """Write into the model without asking vLLM, as frameworks that train may do."""

        def write(model: Any) -> None:
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data.mul_(factor)

        self._llm.apply_model(write)
        return True

    def rest(self, level: int = 1) -> bool:
        """Sleep, and wake up again."""
        self._llm.sleep(level)
        return bool(self._llm.wake_up())

    def wake(self, prompt: list[int], level: int = 1) -> dict[str, float]:
        """Sleep, and wake up for a prompt: seconds until its first token, and what was loaded."""
        self._llm.sleep(level)
        began = time.perf_counter()
        self._llm.wake_up()
        (output,) = self._generate([prompt], max_tokens=1)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cached": output.num_cached_tokens or 0}

    def running(self) -> dict[str, Any]:
        """What vLLM has made of its arguments: which model runner, which CUDA graphs, and so on.

        What its workers decide shows where EngineCore is no process of its own.
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
        """vLLM's counters, by name and labels."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source", "")
                found[f"{metric.name}{{{source}}}" if source else metric.name] = float(value)
        return found

    def shut_down(self) -> None:
        """End the engine in good order."""
        self._llm.llm_engine.engine_core.shutdown()


def _seconds_per_token(output: Any, num_tokens: int) -> float:
    """Of an answer with so many tokens, after the first one."""
    times = output.metrics
    took_s: float = times.last_token_ts - times.first_token_ts
    return took_s / (num_tokens - 1)


def _answer(output: Any, seconds: float) -> dict[str, Any]:
    """The answer to a request that is done."""
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
    main()
