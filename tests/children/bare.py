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
import ray

import raykv
from raykv.base.ids import Direction, Key, Namespace, NodeId
from raykv.base.settings import Settings
from raykv.cluster import ask
from raykv.engine.listed import EnginePlace
from raykv.engine.requests import RequestOptions
from raykv.engine.runtime import new_life
from raykv.engine.session import Session
from raykv.engine.view import EngineView
from raykv.memory.region import Region
from raykv.node.states.file import HiddenStates, promise, settle, write_states
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyJob, CopyResult
from raykv.protocol.engine import NOTHING_ORDERED, EngineHello
from raykv.protocol.worker import KVLayout, TensorLayout
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
    """Wait until a condition holds."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.01)


def stored_and_loaded(node_id: str) -> bool:
    """Store chunks and load them into other blocks; whether the bytes are the same."""
    view, sizes = EngineView(Settings(request_deadline_s=50.0)), {0: CHUNK_BYTES}
    life = new_life()
    hello = EngineHello("bare", life, NAMESPACE, "tiny", slot_bytes=sizes)
    described = ask.describe(ask.find_node_actor(node_id), PATIENCE_S)

    def call(method: str, argument: bytes | str) -> bytes:
        scheduler = ask.find_scheduler_actor()
        answer: bytes = ray.get(getattr(scheduler, method).remote(argument), timeout=5.0)
        return answer

    session = Session(view, hello, [EnginePlace(NodeId(node_id))], lambda *_: described, call)
    session.attach(PATIENCE_S)
    session.start()

    def knows_orders() -> bool:
        session.drain()
        return view.orders != NOTHING_ORDERED

    until(knows_orders, "the node knows what operators want")
    kv = Region.anonymous(2 * NUM_CHUNKS * CHUNK_BYTES, "bare-kv")
    half = NUM_CHUNKS * CHUNK_BYTES
    ctypes.memmove(kv.address, random.Random(7).randbytes(half), half)
    tensor = TensorLayout(0, 2 * NUM_CHUNKS, CHUNK_BYTES, CHUNK_BYTES)
    layout = KVLayout("memfd", kv.num_bytes, 1, [tensor], [0], [[0]])
    link = WorkerLink(0, layout, [kv.fd], LinkSettings())
    link.set_target(LinkTarget(described.socket_name, "bare", life, NAMESPACE, 1, sizes))
    until(lambda: link.node_life != 0, "the worker attaches")
    view.start_request("request", RequestOptions())
    assert view.prepare_store("request", KEYS) == KEYS
    ones, zeros = Numbers.of([1] * NUM_CHUNKS), Numbers.of([0] * NUM_CHUNKS)
    for number, direction in enumerate((Direction.STORE, Direction.LOAD), start=1):
        first = (number - 1) * NUM_CHUNKS
        blocks = Numbers.of(range(first, first + NUM_CHUNKS))
        job = CopyJob(
            number, direction, NAMESPACE, Keys.of(KEYS), ones, zeros, blocks, orders=view.orders
        )
        link.submit(JobRequest(job))
        results: list[CopyResult] = []

        def has_ended(results: list[CopyResult] = results) -> bool:
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
    """Read captured states; return the kind of array, the kind of number, and the values."""
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
