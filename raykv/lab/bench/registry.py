"""The benchmarks by name; a benchmark's module is loaded when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from raykv.base.errors import SettingError
from raykv.lab.bench.report import Options, Result


class Run(Protocol):
    """What each benchmark module has."""

    def __call__(self, options: Options) -> Result:
        """Measure."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's name and its line in `raykv bench --list`. `needs_gpu`: it runs only if it is
    named.
    """

    name: str
    summary: str
    needs_gpu: bool = False

    def run(self, options: Options) -> Result:
        """Measure."""
        run = cast(Run, import_module(f"raykv.lab.bench.{self.name}").run)
        return run(options)


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("lookup", "µs per lookup of a prefix that is wholly on the own node"),
        Benchmark("policy", "prefix hit rates of the orders of eviction beside the optimum"),
        Benchmark("windows", "what models with sliding windows store, and find again"),
        Benchmark("copy", "GB/s between a KV cache and the pool, by page size"),
        Benchmark("fetch", "GB/s from node to node, beside a bare Ray pull and plain TCP"),
        Benchmark("disk", "MiB/s of the disk tier beside plain files, and what it costs loads"),
        Benchmark("scale", "what 10 to 2000 nodes ask of the scheduler actor"),
        Benchmark("step", "what RayKV's hooks take on vLLM's threads, and its manager per chunk"),
        Benchmark("ttft", "time to first token by where a prompt's KV comes from"),
        Benchmark("throughput", "requests per second with and without RayKV and reuse"),
        Benchmark(
            "gpu", "RayKV on a GPU beside vLLM alone and its native offloading", needs_gpu=True
        ),
        Benchmark("client", "vLLM's own clients beside plain vLLM and other KV caches"),
        Benchmark("hidden_states", "MB/s of hidden states, beside vLLM's example connector"),
        Benchmark("restart", "what a pool adds to an engine's start"),
        Benchmark("sleep", "time from an engine's wake-up to the first token of a known prompt"),
        Benchmark("routing", "what it costs a request to be placed, beside its tokenising"),
        Benchmark("serve_routing", "conversations over two replicas: routers, with and without"),
        Benchmark("disaggregated", "prefill and decode engines apart, beside one that does both"),
        Benchmark("feed", "how soon engines know what others have stored, and what that costs"),
        Benchmark("footprint", "memory, CPU, threads and descriptors of RayKV's processes"),
        Benchmark("pool", "what a NodeActor's index does when its pool is full, and a chunk takes"),
        Benchmark("directory", "the scheduler actor's chunks: rates, and bytes of memory for each"),
    )
}


def chosen(names: list[str]) -> list[Benchmark]:
    """Benchmarks by name; if none is named, all that any machine can run.

    Raises:
        SettingError: there is no benchmark of such a name.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        known = ", ".join(BENCHMARKS)
        raise SettingError(f"there is no benchmark {', '.join(unknown)}; choose from {known}")
    return [BENCHMARKS[name] for name in names] or [
        benchmark for benchmark in BENCHMARKS.values() if not benchmark.needs_gpu
    ]
