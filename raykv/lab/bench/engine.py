"""The parent's side of `engine_child`: a real vLLM engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

from raykv.base.errors import RayKVError
from raykv.client.cluster import Cluster, connect
from raykv.cluster.join import ensure_cluster, stop_started

START_DEADLINE_S = 240.0
"""An engine starts in 10 to 20 s on a quiet machine, and in 80 s on a busy one. The first one on a
machine with a GPU reads gigabytes of libraries, and compiles kernels.
"""

ANSWER_DEADLINE_S = 300.0

POOL_S, STORE_S, SETTLE_S, LOOK_S = 60.0, 60.0, 0.4, 0.05
"""Deadlines of pools and of stores, time without new stores, and pauses between looks."""

MOST_OF_POOL = 0.95
"""The share that counts as all: a little is never page-locked."""

CHILD = (sys.executable, "-m", "raykv.lab.bench.engine_child")


@contextlib.contextmanager
def own_cluster() -> Iterator[Cluster]:
    """Start a Ray cluster on this host for the context, since others may be in use."""
    address = ensure_cluster("local").address
    with contextlib.ExitStack() as stack:
        stack.callback(stop_started, address)
        cluster = stack.enter_context(connect(address))
        stack.callback(cluster.down)
        yield cluster


def started_together(*starts: Callable[[], EngineProcess]) -> list[EngineProcess]:
    """Start engines at the same time: most of a start is work for one core.

    Raises:
        EngineError: one of them did not start.
    """
    with ThreadPoolExecutor(len(starts)) as threads:
        coming = [threads.submit(start) for start in starts]
    if any(each.exception() for each in coming):
        for each in coming:
            if not each.exception():
                each.result().stop()
    return [each.result() for each in coming]


def all_cores_but_one() -> str:
    """Return the cores for engines on CPUs; the last one is left to all other processes."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[:-1] or cores))


def wait_for_pools(cluster: Cluster, ready: str = "prefaulted_bytes") -> None:
    """Wait until nearly all of the pools' pages are ready, or until a deadline.

    `ready` is the field of the status that counts such bytes.
    """
    give_up_at = time.monotonic() + POOL_S
    while time.monotonic() < give_up_at:
        nodes = cluster.status().nodes
        if all(getattr(node, ready) > MOST_OF_POOL * node.pool_bytes for node in nodes):
            return
        time.sleep(LOOK_S)


def settle(cluster: Cluster, still_s: float = SETTLE_S) -> None:
    """Wait until RayKV has reported no new stores for a while, or until a deadline."""
    give_up_at, seen, since = time.monotonic() + STORE_S, -1, time.monotonic()
    while time.monotonic() < min(give_up_at, since + still_s):
        now = sum(node.bytes_stored for node in cluster.status().nodes)
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(LOOK_S)


class EngineError(RayKVError):
    """The engine did not start, or a command failed in it."""


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that engines use."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


def launched(
    environment: dict[str, str], log: Path, command: Sequence[str] = CHILD
) -> ChildProcess:
    """Start a process of `engine_child` in its own session."""
    with log.open("ab") as stderr:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )


class FirstToken(NamedTuple):
    """Seconds until it came, and how many tokens of the prompt came out of a cache."""

    seconds: float
    cached: int


class EngineProcess:
    """A vLLM engine with RayKV.

    Args:
        model: a folder.
        log: a file; the engine's output is appended.
        raykv: settings of RayKV; None for an engine without RayKV.
        multiprocess: EngineCore is a process of its own.
        cores: the CPU that vLLM's threads are bound to.
        start_deadline_s: how long it may take to start.
        config: arguments of `vllm.LLM`; `connector` names another KV connector.

    Raises:
        EngineError: it did not start.
    """

    launch: ClassVar[Callable[[dict[str, str], Path], ChildProcess]] = staticmethod(launched)
    """Starts the process, given its environment and its log."""

    def __init__(
        self,
        model: Path,
        log: Path,
        raykv: dict[str, Any] | None,
        *,
        multiprocess: bool = False,
        cores: str = "0",
        start_deadline_s: float = START_DEADLINE_S,
        **config: Any,
    ) -> None:
        self._log = log
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = self._launched(environment)
        self._buffer = b""
        config = {"model": str(model), "max_model_len": 4096, "block_size": 32, **config}
        self._send({**config, "raykv": raykv})
        began = time.monotonic()
        try:
            self._receive(start_deadline_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - began

    def _launched(self, environment: dict[str, str]) -> ChildProcess:
        return EngineProcess.launch(environment, self._log)

    @property
    def pid(self) -> int:
        """Id of the engine's main process."""
        return self._process.pid

    @property
    def log_text(self) -> str:
        """Everything that the engine has printed."""
        return self._log.read_text(errors="replace")

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        self._send({"do": do, **arguments})

    def finish(self) -> Any:
        """Wait for the answer to the oldest unanswered command."""
        answer = self._receive(ANSWER_DEADLINE_S)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["answer"]

    def call(self, do: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        self.begin(do, **arguments)
        return self.finish()

    def tokens(self, prompts: list[list[int]], **arguments: Any) -> list[list[int]]:
        """Return the greedy tokens of each prompt; assert that no request ended early."""
        outputs = self.call("generate", prompts=prompts, **arguments)
        assert all(output["reason"] == "length" for output in outputs), outputs
        return [output["tokens"] for output in outputs]

    def cached(self, prompts: list[list[int]], **arguments: Any) -> list[int]:
        """Return how many tokens of each prompt came out of vLLM's cache or RayKV."""
        outputs = self.call("generate", prompts=prompts, **arguments)
        return [output["cached"] for output in outputs]

    def first_token(self, tokens: list[int]) -> FirstToken:
        """Ask for one token behind a prompt."""
        (output,) = self.call("generate", prompts=[tokens], max_tokens=1)
        return FirstToken(float(output["ttft_s"]), output["cached"] or 0)

    def reset(self, *, connector: bool = False) -> None:
        """Drop vLLM's prefix cache, and with `connector` RayKV's chunks of this model too.

        Raises:
            EngineError: some of its blocks are still in use.
        """
        if not self.call("reset", connector=connector):
            raise EngineError("vLLM kept its prefix cache: some of its blocks are still in use")

    def stop(self) -> None:
        """End the engine in good order, else by force."""
        if self._process.poll() is None:
            try:
                self._send({"do": "exit"})
                self._receive(30.0)
                self._process.wait(30.0)
            except (EngineError, OSError, subprocess.TimeoutExpired):
                self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # Closing flushes; a process that has just ended reads no more.
                with contextlib.suppress(OSError):
                    pipe.close()

    def kill(self) -> None:
        """Send SIGKILL to the engine and its children, if they are alive."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30.0)

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        give_up_at = time.monotonic() + deadline_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = give_up_at - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise EngineError(f"no answer within {deadline_s} s; {self._tail()}")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise EngineError(f"the engine has ended; {self._tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return "its log ends with:\n" + self.log_text[-6000:]
