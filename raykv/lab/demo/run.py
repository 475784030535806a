"""Drive vLLM and Ray for `raykv demo`: a real model, long real documents, and what RayKV saves.

    run_demo ── asks ──► vLLM + RayKV ──► Ask records ──► Report ──► tables, JSON, exit code

Importing this module is light: vLLM and Ray are imported once the demo runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from raykv.base.errors import SettingError
from raykv.base.extras import require
from raykv.base.settings import load_settings
from raykv.lab.demo.engine import DemoEngine, Setup, log_path
from raykv.lab.demo.prompts import document_prompts, random_prompts
from raykv.lab.demo.report import show
from raykv.lab.demo.session import DemoSession
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.serve.models import SMOLLM2_NAME, smollm2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_NODES = 2
_ALWAYS_FETCH = {"always_fetch": True}  # shown is a fetch, even if computing were faster


def run_demo(  # noqa: PLR0913 - the options of a command
    *,
    tiny: bool,
    json_path: Path | None,
    rounds: int = 3,
    nodes: int = 1,
    ray_address: str | None,
    pool_bytes: str | None,
    console: Console | None,
    note_actors: Callable[[str], None] = lambda _address: None,
) -> int:
    """Serve a model with RayKV, ask it questions in rounds, and print what that took.

    Starts a local Ray if there is none, and stops only what it started: a RayKV that ran in the
    cluster before keeps its actors, its pool and what the demo stored there. What the engines and
    Ray print goes to a log file that is named on the console.

    Args:
        tiny: A seeded random model and random prompts instead of the real ones; under a minute.
        json_path: Where the report is also written as JSON; its folder must exist.
        rounds: One that computes, and `rounds - 1` that load from RayKV.
        nodes: With 2, another Ray node is started on this host after the rounds, and an engine
            there answers from what the first node has.
        ray_address: The cluster to join; None finds or starts one.
        pool_bytes: RayKV's setting of that name; None is its default.
        console: Where to print; standard output when None.
        note_actors: Called with the address of a cluster in which the demo has made RayKV's
            actors, and with "" once they are gone again.

    Returns:
        0, or 1 if any answer differed between the rounds or the nodes.

    Raises:
        RayKVError: The settings, the model, the cluster or the engine are not fit for the demo.
    """
    require("raykv demo", "vllm")
    if rounds < 2:
        raise SettingError(f"rounds={rounds}: RayKV loads from the second round on, so at least 2")
    if not 1 <= nodes <= MAX_NODES:
        raise SettingError(f"nodes={nodes}: the demo runs on 1 Ray node or on {MAX_NODES}")
    if json_path and not json_path.parent.is_dir():
        raise SettingError(f"--json {json_path}: the folder {json_path.parent} does not exist")
    raykv = {"ray_address": ray_address, "pool_bytes": pool_bytes}
    raykv = {name: value for name, value in raykv.items() if value is not None}
    load_settings(raykv)
    console = console or Console()
    _set_engine_environment()
    log = log_path()
    with _child_output_in(log, console), ExitStack() as stack:
        console.print(f"The engine's and Ray's output is in {log}", style="dim", soft_wrap=True)
        with console.status("starting") as status:
            setup = (_tiny_setup if tiny else _real_setup)(stack, status.update)
            stack.callback(note_actors, "")
            session = _start(stack, setup, ray_address, raykv, nodes, status.update, note_actors)
        report = session.run(rounds, console)
    console.print(show(report))
    if json_path:
        json_path.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return report.exit_code


def _real_setup(stack: ExitStack, say: Callable[[str], None]) -> Setup:
    del stack
    return Setup(
        model=smollm2(progress=say),
        name=SMOLLM2_NAME,
        caveat="A model of 135 million parameters is often wrong about what it has read.",
        engine_options={"max_model_len": 8192},
        sampling_options={"max_tokens": 32},
        make_prompts=lambda llm: document_prompts(llm.get_tokenizer()),
    )


def _tiny_setup(stack: ExitStack, say: Callable[[str], None]) -> Setup:
    del say
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-tiny-"))
    return Setup(
        model=tiny_llama(Path(folder), vocab_size=512),
        name="random Llama, 4 layers",
        caveat="The weights are random: the answers are token ids and mean nothing.",
        engine_options={"max_model_len": 4096, "skip_tokenizer_init": True},
        sampling_options={"max_tokens": 16, "ignore_eos": True, "detokenize": False},
        make_prompts=lambda llm: random_prompts(512, seed=0),
    )


def _start(
    stack: ExitStack,
    setup: Setup,
    ray_address: str | None,
    raykv: Mapping[str, Any],
    nodes: int,
    say: Callable[[str], None],
    note_actors: Callable[[str], None],
) -> DemoSession:
    """Start cluster and engine; `stack` takes down in reverse order what was not there before."""
    from raykv.client.cluster import connect
    from raykv.cluster.ask import find_scheduler_actor
    from raykv.cluster.join import ensure_cluster, stop_started

    say("looking for a Ray cluster, or starting one")
    joined = ensure_cluster(ray_address)
    if joined.started:
        stack.callback(stop_started, joined.address)
    cluster = connect(joined.address)  # before the engine: errors show sooner
    stack.callback(cluster.close)
    if find_scheduler_actor() is None:  # then the actors that the engine starts are the demo's
        if not joined.started:
            note_actors(joined.address)
        stack.callback(cluster.down)
    say(f"starting vLLM with {setup.name}")
    raykv = {**raykv, "ray_address": joined.address}
    engine = DemoEngine(setup, raykv)
    stack.callback(engine.shut_down)
    start_other = partial(_start_other, stack, setup, raykv) if nodes > 1 else None
    return DemoSession(setup, engine, start_other, cluster)


def _start_other(stack: ExitStack, setup: Setup, raykv: Mapping[str, Any]) -> DemoEngine:
    """Start one more Ray node on this host and an engine on it; `stack` ends both."""
    from raykv.cluster.ask import end_node_actor
    from raykv.lab.hosts.local_nodes import add_local_node

    node = add_local_node(raykv["ray_address"])
    stack.callback(node.stop)
    stack.callback(end_node_actor, node.node_id)
    engine = DemoEngine(setup, {**raykv, **_ALWAYS_FETCH, "node_id": node.node_id})
    stack.callback(engine.shut_down)
    return engine


def _set_engine_environment() -> None:
    """Settings that vLLM reads when it is imported; what the user has set stays."""
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if len(cores) > 1:  # the last core is for Ray and for vLLM's other processes
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:-1]))
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def _child_output_in(log: Path, console: Console) -> Iterator[None]:
    """Send this process's standard output and error, and its children's, to `log`.

    The engine's processes inherit the descriptors, so nothing less keeps them off the display. A
    console on standard output or error goes on where it was.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    shown = console.file
    with ExitStack() as stack:
        display = _duplicate_of_terminal(console)
        if display is not None:
            console.file = stack.enter_context(display)
            stack.callback(setattr, console, "file", shown)
        sink = stack.enter_context(log.open("wb"))
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            stack.callback(stream.flush)
            os.dup2(sink.fileno(), descriptor)
        yield


def _duplicate_of_terminal(console: Console) -> IO[str] | None:
    """A second file object for what `console` writes to; None if that is not our output."""
    try:
        descriptor = console.file.fileno()
    except (AttributeError, OSError):  # a string buffer, or a test's capture
        return None
    if descriptor not in (1, 2):
        return None
    return os.fdopen(os.dup(descriptor), "w", encoding=console.encoding)
