"""`python -m tests.bench NAME`: benchmarks for design decisions; `tables` rewrites RESULTS.md.

`claims` measures some of the published numbers again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial

from raykv.base.errors import RayKVError
from raykv.lab.bench.claims import run_claims
from raykv.lab.bench.command import (
    BENCHMARKS,
    Benchmark,
    chosen,
    run_benchmarks,
)
from raykv.lab.bench.engine import EngineProcess, launched
from raykv.lab.bench.report import Options
from raykv.lab.warden import ending_what_it_starts
from tests.bench import claims, tables
from tests.fixtures.engine_child import CHILD

SUMMARIES = {
    "scale": "what 10 to 2000 nodes ask of the scheduler actor",
    "step": "what RayKV's hooks take on vLLM's threads, and its manager per chunk",
    "ttft": "time to first token by where a prompt's KV comes from",
    "over_nodes": "what engines lose whose ranks are on two nodes",
    "throughput": "requests per second with and without RayKV and reuse",
    "disaggregated": "prefill and decode apart, beside one engine that does both",
    "feed": "how soon engines know what others have stored, and what that costs",
    "footprint": "memory, CPU, threads and descriptors of RayKV's processes",
    "pool": "what a NodeActor's index does when its pool is full",
    "directory": "the scheduler actor's chunks: rates, and bytes of memory each",
    "routing_simulation": "routers in front of a simulated cluster",
    "copy_cuda": "GB/s between a GPU's KV cache and the pool",
}
NEEDS = {"copy_cuda": "a GPU"}
HERE = {
    name: Benchmark(name, summary, "tests.bench", NEEDS.get(name, ""))
    for name, summary in SUMMARIES.items()
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--repeats", type=int, help="repeats of each measurement")
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        help="for routing_simulation, policy and client: a file of requests",
    )
    parser.add_argument("--json", metavar="FILE", help='also write the results there, or to "-"')
    parser.add_argument("--keep", action="store_true", help="write them to tests/bench/results")
    asked = parser.parse_args()
    known = {**BENCHMARKS, **HERE}
    if asked.list:
        width = max(map(len, known))
        for each in known.values():
            needs = f" (needs {each.needs})" if each.needs else ""
            sys.stdout.write(f"{each.name:{width}}  {each.summary}{needs}\n")
    elif asked.names == ["tables"]:
        tables.TARGET.write_text(tables.page())
    elif asked.keep and (asked.json or asked.quick or not asked.names):
        parser.error("--keep names benchmarks, and goes with neither --json nor --quick")
    elif "claims" in asked.names and (
        len(asked.names) > 1 or asked.keep or asked.quick or asked.trace
    ):
        parser.error("claims goes with neither a benchmark, --keep, --quick nor --trace")
    else:
        options = Options(asked.repeats, asked.quick, tuple(asked.trace))
        # A command that vLLM runs in a process of its own.
        EngineProcess.launch = partial(launched, command=CHILD)
        try:
            with ending_what_it_starts():
                sys.exit(_run(asked, options, known))
        except RayKVError as error:
            parser.exit(2, f"{error}\n")


def _run(asked: argparse.Namespace, options: Options, known: Mapping[str, Benchmark]) -> int:
    if asked.names == ["claims"]:
        return run_claims(options, asked.json, claims.CLAIMS, known)
    benchmarks = chosen(asked.names, known)
    if not asked.keep:
        run_benchmarks(benchmarks, options, asked.json)
        return 0
    for benchmark in benchmarks:
        run_benchmarks([benchmark], options, str(tables.result_path(benchmark.name)))
    return 0


if __name__ == "__main__":
    main()
