"""Two models in one application of Ray Serve: over HTTP, with clients that don't know of RayKV."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from raykv.client.cluster import Cluster
from tests.fixtures.ray_serve import (
    CACHED,
    START_DEADLINE_S,
    TEXT,
    Served,
    cached,
    engines,
    is_up,
    replicas,
    serving,
    stored,
)
from tests.fixtures.scrapes import scrape
from tests.fixtures.waiting import wait_until
from tests.house import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

OUT_OF_ROTATION_S = 3.0


@pytest.fixture(scope="module")
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(cluster, tmp_path_factory.mktemp("models")) as running:
        yield running


@pytest.mark.timeout(400)
def test_prompt_of_one_replica_is_a_hit_for_the_next_and_never_for_the_other_model(
    served: Served,
) -> None:
    first = stored(served, "general", TEXT)
    assert cached(first) == 0
    prompts = served.counters("vllm:prompt_tokens_total")
    assert len(prompts) == 2
    (second,) = [replica for replica, tokens in prompts.items() if not tokens]
    answers = []

    def is_asked() -> bool:
        answers.append(served.complete("general", TEXT))
        return served.counters("vllm:prompt_tokens_total")[second] > 0

    wait_until(is_asked, 60.0, "the other replica is asked, too")
    assert {answer.choices[0].text for answer in answers} == {first.choices[0].text}
    assert cached(answers[-1]) >= CACHED
    assert served.counters("vllm:external_prefix_cache_hits_total")[second] == cached(answers[-1])

    other = stored(served, "code", TEXT)
    assert cached(other) == 0
    assert other.choices[0].text != first.choices[0].text
    assert served.complete("general", TEXT).choices[0].text == first.choices[0].text
    assert served.complete("code", TEXT).choices[0].text == other.choices[0].text


def test_client_finds_both_models_and_errors_are_those_of_the_api(served: Served) -> None:
    import openai

    assert {model.id for model in served.client.models.list()} == {"general", "code"}
    with pytest.raises(openai.NotFoundError, match="code, general"):
        served.complete("nobody", "x")
    with pytest.raises(openai.BadRequestError, match="1024"):
        served.complete("code", "x", max_tokens=5000)
    chat = served.client.chat.completions.create(
        model="code", messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert chat.usage.completion_tokens <= 4


def test_client_names_its_session_where_the_application_allows_it(
    served: Served, cluster: Cluster
) -> None:
    params = {"raykv_session": "serve", "raykv_session_over": True}
    for model in ("general", "code"):
        served.complete(model, TEXT, extra_body={"kv_transfer_params": params})
    wait_until(lambda: bool(cluster.sessions()), 20.0, "the session is told")
    (known,) = cluster.sessions()
    assert (known.session, known.stage, known.requests) == ("serve", "over", 1)
    assert known.chunks >= CACHED // 32


def test_tokens_stream_one_by_one_and_client_that_leaves_ends_its_request(served: Served) -> None:
    running = "vllm:num_requests_running"
    messages = [{"role": "user", "content": "Tell me a long story."}]
    asked: dict[str, Any] = {"model": "general", "messages": messages, "stream": True}
    whole = list(
        served.client.chat.completions.create(
            **asked, max_tokens=20, extra_body={"ignore_eos": True}
        )
    )
    assert len(whole) >= 20
    # Not while the stream runs: on two busy cores an answer takes as long as all of its tokens.
    before = served.total("vllm:generation_tokens_total")
    stream = served.client.chat.completions.create(
        **asked, max_tokens=900, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()

    def is_given_up() -> bool:
        # An engine with nothing to do tells no new numbers.
        served.complete("general", "x", max_tokens=2)
        return served.total(running) == 0

    wait_until(is_given_up, 10.0, "the request has been given up")
    assert served.total("vllm:generation_tokens_total") - before < 900


def test_vllm_bench_ends_without_failed_requests(served: Served, tmp_path: Path) -> None:
    general = served.application["args"]["models"][0]["model"]
    command = [sys.executable, "-m", "raykv.vllm.command", "bench", "serve"]
    command += ["--backend", "openai", "--base-url", f"http://127.0.0.1:{served.port}"]
    command += ["--endpoint", "/v1/completions", "--model", "general", "--tokenizer", general]
    command += ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "256"]
    command += ["--prefix-repetition-suffix-len", "32", "--prefix-repetition-num-prefixes", "3"]
    command += ["--prefix-repetition-output-len", "8", "--num-prompts", "12"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    root = str(ROOT)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (12, 0)


@dataclass
class Load:
    """What became of requests: when they ended, and how."""

    ends: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken_at: list[float] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def ask(self, served: Served, text: str, expected: str) -> None:
        """Whole answers and streams in turn, until told to end."""
        while not self.done.is_set():
            try:
                answer = served.complete("general", text)
            except Exception as error:  # noqa: BLE001 - each is a finding
                self.failed.append(f"{type(error).__name__}: {error}")
            else:
                if answer.choices[0].text != expected:
                    self.failed.append(answer.choices[0].text)
            self._stream(served, text, expected)
            self.ends.append(time.monotonic())

    def _stream(self, served: Served, text: str, expected: str) -> None:
        pieces: list[str] = []
        try:
            for event in served.complete("general", text, stream=True):
                pieces += [choice.text for choice in event.choices]
        except Exception as error:  # noqa: BLE001 - the same
            if pieces:
                self.broken_at.append(time.monotonic())
            else:
                self.failed.append(f"stream, {type(error).__name__}: {error}")
        else:
            if "".join(pieces) != expected:
                self.failed.append(f"stream: {pieces}")


@pytest.mark.timeout(400)
def test_no_request_fails_when_an_engine_is_killed_and_its_successor_starts_warm(
    served: Served,
) -> None:
    texts = [f"{number}. {TEXT}"[: len(TEXT)] for number in range(4)]
    expected = [stored(served, "general", text).choices[0].text for text in texts]
    before = set(served.counters("vllm:prompt_tokens_total"))
    load = Load()
    with ThreadPoolExecutor(len(texts)) as threads:
        asked = [
            threads.submit(load.ask, served, *each) for each in zip(texts, expected, strict=True)
        ]
        wait_until(lambda: len(load.ends) > 8, 60.0, "requests are answered")
        engines("general")[0].kill()
        killed_at = time.monotonic()
        wait_until(lambda: time.monotonic() - killed_at > OUT_OF_ROTATION_S + 2, 30.0, "time")
        load.done.set()
        for each in asked:
            each.result(60)
    assert not load.failed
    assert not load.broken_at
    assert len([at for at in load.ends if at > killed_at + OUT_OF_ROTATION_S]) > 4

    # Not the engine but its replica: the engine is not left behind, the next request waits.
    (left,) = engines("code")
    for replica in replicas("code"):
        replica.kill()
    assert not psutil.wait_procs([left], timeout=10)[1]

    def successor() -> set[str]:
        return set(served.counters("vllm:prompt_tokens_total")) - before

    wait_until(lambda: len(successor()) == 1, START_DEADLINE_S, "another replica is there")
    (new,) = successor()
    answers = [served.complete("general", texts[0]) for _ in range(2)]
    assert [answer.choices[0].text for answer in answers] == [expected[0]] * 2
    assert min(map(cached, answers)) >= CACHED
    hits = "vllm:external_prefix_cache_hits_total"
    # The ingress shows a page for a second.
    wait_until(lambda: served.counters(hits)[new] >= CACHED, 5.0, "the successor has loaded it")
    assert cached(served.complete("code", TEXT)) >= CACHED


def test_metrics_of_vllm_are_rays_too(served: Served) -> None:
    import ray

    (node,) = ray.nodes()
    target = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    told = "ray_vllm_prompt_tokens"
    wait_until(lambda: told in scrape(target), 30.0, "Ray's agent has them")
    page = scrape(target)
    assert "raykv_prompt_tokens" in page


@pytest.mark.timeout(300)
def test_nothing_is_lost_when_a_replica_is_taken_away(served: Served) -> None:
    texts = [f"Chapter {number}. {TEXT}"[: len(TEXT)] for number in range(2)]
    # Two in turn: each replica has computed one of them.
    expected = [stored(served, "general", text).choices[0].text for text in texts]
    before = engines("general")
    served.application["deployments"] = [{"name": "general", "num_replicas": 1}]
    load = Load()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(load.ask, served, texts[0], expected[0])
        wait_until(lambda: bool(load.ends), 60.0, "requests are answered")
        served.deploy()
        wait_until(lambda: len(engines("general")) == 1, 60.0, "one engine has ended")
        load.done.set()
        asked.result(60)
    assert not load.failed
    assert not load.broken_at
    assert engines("general")[0] in before, "who stays is not started again"
    answers = [served.complete("general", text) for text in texts]
    assert [answer.choices[0].text for answer in answers] == expected
    assert min(map(cached, answers)) >= CACHED


@pytest.mark.timeout(400)
def test_load_brings_a_replica_that_starts_warm(served: Served) -> None:
    """One replica is left; see the test before."""
    text = f"Autoscaling. {TEXT}"[: len(TEXT)]
    expected = stored(served, "general", text).choices[0].text
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 1,
        "downscale_delay_s": 600,
        "look_back_period_s": 2,
        "metrics_interval_s": 0.5,
    }
    served.application["deployments"] = [{"name": "general", "autoscaling_config": scaling}]
    served.deploy()
    wait_until(is_up, START_DEADLINE_S, "the application is up")
    before = engines("general")
    assert len(before) == 1
    known = set(served.counters("vllm:prompt_tokens_total"))
    load = Load()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(load.ask, served, text, expected) for _ in range(4)]

        def is_shared() -> bool:
            there = served.counters("vllm:prompt_tokens_total")
            return any(there[replica] > 0 for replica in set(there) - known)

        wait_until(is_shared, START_DEADLINE_S, "another replica answers requests")
        load.done.set()
        for each in asked:
            each.result(60)
    assert not load.failed
    assert not load.broken_at
    assert before[0] in engines("general"), "who was there stays"
    (new,) = set(served.counters("vllm:prompt_tokens_total")) - known
    hits = "vllm:external_prefix_cache_hits_total"
    # The ingress shows a page for a second.
    wait_until(lambda: served.counters(hits)[new] >= CACHED, 5.0, "the successor has loaded it")
