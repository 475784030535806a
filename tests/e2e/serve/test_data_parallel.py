"""One server with two data-parallel engines, each with KV memory of its own, over one pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from tests.fixtures.server import Server, served
from tests.fixtures.waiting import wait_until
from tests.house import CHILDREN

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

BLOCK = 32
TEXT = "In a hole in the ground there lived a hobbit. Not a nasty, dirty, wet hole. " * 6


# vLLM's CPU worker makes the buffers between stages only when it warms the model up.
STAGES = (
    "--pipeline-parallel-size=2",
    "--no-enforce-eager",
    '--compilation-config={"mode": 1, "backend": "eager"}',
)


def ask(server: Server, rank: int, text: str) -> tuple[str, int]:
    """The answer of one engine, and how many tokens it has loaded."""
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0}
    before = server.counter("vllm:external_prefix_cache_hits_total")
    headers = {"X-data-parallel-rank": str(rank)}
    answer: Any = server.post("/v1/completions", body, headers)
    loaded = server.counter("vllm:external_prefix_cache_hits_total") - before
    return answer["choices"][0]["text"], int(loaded)


@pytest.mark.parametrize(("num_places", "more"), [(1, ()), (2, STAGES)], ids=["whole", "stages"])
def test_rank_loads_what_the_other_rank_has_stored(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_places: int,
    more: Sequence[str],
) -> None:
    cluster.down()
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN / "patient"))
    flags = ("--data-parallel-size", "2", "--api-server-count", "1", *more)
    cores = "|".join("01" * num_places)
    with served(tmp_path, cluster.address, *flags, cores=cores) as server:
        whole = len(TEXT) // BLOCK
        asked: list[tuple[str, str]] = []

        def is_stored() -> bool:
            """Each time another prompt."""
            text = f"{len(asked)} {TEXT}"
            first, loaded = ask(server, 0, text)
            asked.append((text, first))
            assert not loaded
            time.sleep(1.0)
            return len([*cluster.chunks()]) >= whole * num_places

        wait_until(is_stored, 60.0, "a prompt is stored")
        text, first = asked[-1]
        again, loaded = ask(server, 1, text)
        assert again == first
        assert loaded >= whole * BLOCK - BLOCK
        assert len({engine.engine_id for engine in cluster.status().engines}) == 2
