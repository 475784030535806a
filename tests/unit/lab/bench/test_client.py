"""What servers and clients are started with, and what is made of the files that they write."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.lab.bench.client import (
    GAP,
    MEAN,
    ON_CPU,
    PREFIX_REPETITION,
    QUICK,
    RANDOM,
    TIMED_TRACE,
    chosen_systems,
    loads,
    server,
    summed,
    sweep,
)


def test_each_load_and_repeat_has_prompts_of_its_own_the_same_for_all_servers() -> None:
    plays = loads(ON_CPU, 2, "trace.jsonl")
    kinds = (PREFIX_REPETITION, RANDOM, TIMED_TRACE)
    assert list(plays) == ["warm-up-0", *(f"{name}-{n}" for n in range(2) for name in kinds)]
    seeds = [flags["seed"] for flags in plays.values()]
    assert len(set(seeds)) == len(seeds)
    assert plays["timed_trace-1"]["dataset-path"] == "trace.jsonl"
    assert "timed_trace-0" not in loads(ON_CPU, 1, None)


@pytest.mark.parametrize("sizes", [ON_CPU, QUICK])
def test_prefixes_that_come_again_do_not_fit_into_the_kv_memory(sizes: Any) -> None:
    flags = loads(sizes, 1, None)["prefix_repetition-0"]
    num_prefixes = flags["prefix-repetition-num-prefixes"]
    tokens = num_prefixes * flags["prefix-repetition-prefix-len"]
    assert tokens > 1.4 * sizes.kv_blocks * 128
    assert flags["num-prompts"] >= 2 * num_prefixes
    assert sizes.max_tokens < sizes.kv_blocks * 128


def test_servers_differ_by_their_cache_alone(tmp_path: Path) -> None:
    servers = {name: server(name, "1.2.3.4:5", ON_CPU) for name in ("plain", "native", "raykv")}
    assert servers["plain"] == {}
    assert servers["native"] == {"kv-offloading-backend": "native", "kv-offloading-size": 2.0}
    connector = servers["raykv"]["kv-transfer-config"]
    assert connector["kv_connector"] == "RayKVConnector"
    assert connector["kv_connector_extra_config"]["ray_address"] == "1.2.3.4:5"
    command = sweep(tmp_path, "a model", ON_CPU, servers, {}, is_cpu=True)
    serve = shlex.split(command[command.index("--serve-cmd") + 1])
    assert serve[serve.index("serve") + 1] == "a model"
    assert json.loads((tmp_path / "servers.json").read_text()) == servers


def test_native_offloading_is_left_out_on_a_cpu_and_refused_if_it_is_named() -> None:
    assert chosen_systems([], is_cpu=True) == ["plain", "raykv"]
    assert chosen_systems([], is_cpu=False) == ["plain", "native", "raykv"]
    with pytest.raises(SettingError, match="needs a GPU"):
        chosen_systems(["native"], is_cpu=True)


def write(folder: Path, system: str, load: str, repeat: int, **told: Any) -> None:
    place = folder / "runs" / f"SERVE--{system}-BENCH--{load}-{repeat}"
    place.mkdir(parents=True)
    run = {
        "mean_ttft_ms": 100.0,
        "median_ttft_ms": 90.0,
        "p99_ttft_ms": 200.0,
        "mean_itl_ms": 10.0,
        "output_throughput": 20.0,
        "failed": 0,
        "generated_texts": ["a", "b"],
    }
    (place / "run=0.json").write_text(json.dumps({**run, **told}))


def test_rows_and_budgets_are_those_of_the_files(tmp_path: Path) -> None:
    for repeat in range(2):
        write(tmp_path, "plain", RANDOM, repeat)
        write(tmp_path, "plain", PREFIX_REPETITION, repeat)
        write(tmp_path, "native", PREFIX_REPETITION, repeat, mean_ttft_ms=60.0)
        write(tmp_path, "native", RANDOM, repeat)
        write(tmp_path, "raykv", PREFIX_REPETITION, repeat, mean_ttft_ms=50.0)
        write(tmp_path, "raykv", RANDOM, repeat, mean_itl_ms=11.0, generated_texts=["a", "c"])
    names = ["warm-up", PREFIX_REPETITION, RANDOM]
    result = summed(tmp_path, ["plain", "native", "raykv"], names, 2)
    assert len(result.rows) == 2 * 3 * 6
    budgets = {each.budget: each for each in result.verdicts}
    assert budgets[f"{PREFIX_REPETITION}: {MEAN}, at most 1 x native offloading"].is_met
    assert budgets[f"{PREFIX_REPETITION}: {MEAN}, at most 1.02 x vLLM alone"].measured == 0.5
    assert not budgets[f"{RANDOM}: {GAP}, at most 1.02 x vLLM alone"].is_met
    assert budgets[f"{RANDOM}: texts that differ from those of vLLM alone"].measured == 2
    assert budgets[f"{PREFIX_REPETITION}: texts that differ from those of vLLM alone"].is_met
    assert budgets[f"{RANDOM}: no request fails"].is_met
    assert not [each for each in budgets if each.startswith(f"{RANDOM}: {MEAN}, at most 1 x")]
