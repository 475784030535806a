"""Runs in a bare environment: an engine's session and worker without vLLM, and hidden states.

Usage: python bare.py ADDRESS FOLDER. Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import raykv
from raykv.base.ids import Direction, EngineId, Key, Namespace
from raykv.cluster import ask
from raykv.engine.requests import RequestOptions
from raykv.engine.session import RayCalls, Session, SessionSettings
from raykv.engine.view import EngineView
from raykv.memory.region import Region
from raykv.node.states.file import HiddenStates, promise, settle, write_states
from raykv.protocol.columns import Handles, Keys
from raykv.protocol.worker import JobResult, KVLayout, TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink

NAMESPACE = Namespace("bare")
CHUNK_BYTES = 1 << 20
NUM_CHUNKS = 4
PATIENCE_S = 60.0
KEYS = [Key(number.to_bytes(32, "big") + bytes(4)) for number in range(NUM_CHUNKS)]


def main() -> None:
    """See the module's docstring."""
    address, folder = sys.argv[1], Path(sys.argv[2])
    missing = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is None]
    with raykv.connect(address) as cluster:
        copied = stored_and_loaded(cluster.status().nodes[0].node_id)
        until(lambda: cluster.status().namespaces == {"bare": NUM_CHUNKS}, "all know the chunks")
    states = {kind: states_as_read(folder / kind, kind) for kind in ("bfloat16", "float32")}
    told = {"missing": missing, "copied": copied, "states": states}
    print(json.dumps({**told, "package": str(Path(raykv.__file__).parent)}))


def until(is_so: Callable[[], bool], what: str) -> None:
    """Look again and again, for a time."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.01)


def stored_and_loaded(node_id: str) -> bool:
    """Store chunks and load them into other blocks; whether the bytes are the same."""
    view = EngineView(EngineId("bare"), [0], 10.0, 64)
    sizes = {0: CHUNK_BYTES}
    settings = SessionSettings(
        "bare", node_id, Namespace("bare"), "tiny", 1, sizes, heartbeat_s=0.1
    )
    session = Session(view, RayCalls(ask.find_scheduler_actor, 5.0), settings)
    session.attach(PATIENCE_S)

    def has_slots() -> bool:
        session._exchange_quietly()
        session.drain()
        return len(view.declared_leases()[1].slots) >= NUM_CHUNKS

    until(has_slots, "the engine has slots to store into")
    kv = Region.anonymous(2 * NUM_CHUNKS * CHUNK_BYTES, "bare-kv")
    half = NUM_CHUNKS * CHUNK_BYTES
    ctypes.memmove(kv.address, random.Random(7).randbytes(half), half)
    tensor = TensorLayout(0, 2 * NUM_CHUNKS, CHUNK_BYTES, CHUNK_BYTES)
    layout = KVLayout("memfd", kv.num_bytes, 1, [tensor], [0], [[0]])
    link = WorkerLink(0, layout, [kv.fd], LinkSettings())
    described = ask.describe(ask.find_node_actor(node_id), PATIENCE_S)
    link.set_target(LinkTarget(described.socket_name, "bare", NAMESPACE, 1, sizes))
    until(lambda: link.node_epoch != 0, "the worker attaches")
    view.start_request("request", RequestOptions())
    plan = view.prepare_store("request", KEYS)
    assert plan is not None
    assert [*plan.keys] == KEYS
    slots = [int(handle.slot) for handle in plan.handles]
    handles = Handles(Keys.of([*KEYS]), slots, [int(handle.generation) for handle in plan.handles])
    for number, direction in enumerate((Direction.STORE, Direction.LOAD)):
        blocks = [number * NUM_CHUNKS + chunk for chunk in range(NUM_CHUNKS)]
        ones, zeros = [1] * NUM_CHUNKS, [0] * NUM_CHUNKS
        job = JobRequest(number, direction, link.node_epoch, handles, zeros, ones, zeros, blocks)
        link.submit(job)
        results: list[JobResult] = []

        def has_ended(results: list[JobResult] = results) -> bool:
            results.extend(link.drain())
            return bool(results)

        until(has_ended, "the job ends")
        assert not results[0].failed_chunks, results
    cache = kv.array()
    is_same = bool(np.array_equal(cache[:half], cache[half:]))
    link.close(5.0)
    session.stop(5.0)
    return is_same


def states_as_read(path: Path, dtype: str) -> list[object]:
    """What a reader has of states that were captured: kind of array, kind of number, values."""
    raw = np.arange(6, dtype=np.float32).reshape(1, 2, 3).view(np.uint32)
    if dtype == "bfloat16":
        raw = (raw >> 16).astype(np.uint16)
    fd = promise(str(path))
    states = HiddenStates("r", raw, dtype, np.arange(1))
    write_states(str(path), states)
    settle(fd)
    os.close(fd)
    read = raykv.load_hidden_states(str(path))["hidden_states"]
    assert np.array_equal(read, states["hidden_states"])
    return [type(read).__module__, str(read.dtype), read.tolist()]


if __name__ == "__main__":
    main()
