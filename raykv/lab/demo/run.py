"""`raykv demo`: a real model, long real documents, and what RayKV saves.

run_demo ── asks ──► vLLM + RayKV ──► DemoAsk ──► DemoReport ──► tables, JSON, exit code
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from raykv.base.extras import require
from raykv.base.settings import load_settings
from raykv.client.cluster import Cluster, connect
from raykv.cluster.ask import find_scheduler_actor
from raykv.cluster.join import ensure_cluster, stop_started
from raykv.lab.bench.engine import EngineProcess, all_cores_but_one
from raykv.lab.demo.prompts import document_prompts, random_prompts
from raykv.lab.demo.report import show
from raykv.lab.demo.session import DemoSession, Setup
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.lab.hosts.local_nodes import local_node
from raykv.lab.json_file import json_file, write_json
from raykv.prompts.tokens import load_tokenizer
from raykv.serve.models import SMOLLM2_NAME, cache_root, smollm2


def run_demo(
    *,
    tiny: bool,
    json_path: Path | None,
    rounds: int,
    nodes: int,
    ray_address: str | None,
    pool_bytes: str | None,
    note_actors: Callable[[str], None],
) -> int:
    """Serve a model with RayKV, ask it questions in rounds, and print what that took.

    Starts a local Ray if there is none, and stops only what it started: a RayKV that ran in the
    cluster before keeps its actors, its pool and what the demo stored there. What the engines print
    goes to a log file that is named on the console.

    Args:
        tiny: A seeded random model and random prompts instead of the real ones; under a minute.
        json_path: Where the report is also written as JSON; its folder must exist.
        rounds: One that computes, and `rounds - 1` that load from RayKV.
        nodes: With 2, another Ray node is started on this host after the rounds, and an engine
            there answers from what the first node has.
        ray_address: The cluster to join; None finds or starts one.
        pool_bytes: RayKV's setting of that name; None is its default.
        note_actors: Called with the address of a cluster in which the demo has made RayKV's
            actors, and with "" once they are gone again.

    Returns:
        0, or 1 if any answer differed between the rounds or the nodes.

    Raises:
        RayKVError: The settings, the model, the cluster or the engine are not fit for the demo.
    """
    require("raykv demo", "vllm")
    json_file(json_path)
    raykv = {"ray_address": ray_address, "pool_bytes": pool_bytes}
    raykv = {name: value for name, value in raykv.items() if value is not None}
    load_settings(raykv)
    console = Console()
    log = _new_log()
    console.print(f"The engines' output is in {log}", style="dim", soft_wrap=True)
    with ExitStack() as stack:
        with console.status("starting") as status:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-tiny-"))
            setup = _tiny_setup(Path(folder)) if tiny else _real_setup(status.update)
            status.update("looking for a Ray cluster, or starting one")
            cluster = _join(stack, ray_address, note_actors)
            status.update(f"starting vLLM with {setup.name}")
            engines = DemoEngines(stack, setup, log, {**raykv, "ray_address": cluster.address})
            engine = engines.start()
        start_other = engines.start_elsewhere if nodes > 1 else None
        report = DemoSession(setup, engine, start_other, cluster).run(rounds, console)
    console.print(show(report))
    write_json(json_path, report.as_json())
    return report.exit_code


def _real_setup(say: Callable[[str], None]) -> Setup:
    model = smollm2(progress=say)
    say("reading the documents")
    tokenizer = load_tokenizer(str(model), local_files_only=True)
    return Setup(
        model=model,
        name=SMOLLM2_NAME,
        caveat="A model of 135 million parameters is often wrong about what it has read.",
        prompts=document_prompts(tokenizer),
        config={"max_model_len": 8192, "skip_tokenizer_init": False},
        sampling={"max_tokens": 32, "ignore_eos": False},
        decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)).strip(),
    )


def _tiny_setup(folder: Path) -> Setup:
    return Setup(
        model=tiny_llama(folder, vocab_size=512),
        name="random Llama, 4 layers",
        caveat="The weights are random: the answers are token ids and mean nothing.",
        prompts=random_prompts(512, seed=0),
        config={"max_model_len": 4096},
        sampling={"max_tokens": 16},
        decode=lambda tokens: " ".join(map(str, tokens)),
    )


def _new_log() -> Path:
    """An empty file for what the engines print."""
    log = cache_root() / "demo.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    return log


def _join(stack: ExitStack, ray_address: str | None, note_actors: Callable[[str], None]) -> Cluster:
    """Join a cluster; `stack` takes down in reverse order what was not there before."""
    stack.callback(note_actors, "")
    joined = ensure_cluster(ray_address)
    if joined.started:
        stack.callback(stop_started, joined.address)
    cluster = connect(joined.address)
    stack.callback(cluster.close)
    if find_scheduler_actor() is None:  # then the actors that the engine starts are the demo's
        if not joined.started:
            note_actors(joined.address)
        stack.callback(cluster.down)
    return cluster


@dataclass(frozen=True)
class DemoEngines:
    """Starts engines, with RayKV's settings; `stack` ends them."""

    stack: ExitStack
    setup: Setup
    log: Path
    raykv: dict[str, Any]

    def start(self, **settings: Any) -> EngineProcess:
        """An engine on this host's node, if `settings` name no other one."""
        engine = EngineProcess(
            self.setup.model,
            self.log,
            {**self.raykv, **settings},
            multiprocess=True,
            cores=all_cores_but_one(),
            # vLLM's own choice.
            block_size=None,
            **self.setup.config,
        )
        self.stack.callback(engine.stop)
        return engine

    def start_elsewhere(self) -> EngineProcess:
        """One more Ray node on this host, and an engine on it.

        It always fetches, even where computing is faster: the demo shows fetches.
        """
        node_id = self.stack.enter_context(local_node(self.raykv["ray_address"]))
        return self.start(node_id=node_id, always_fetch=True)
