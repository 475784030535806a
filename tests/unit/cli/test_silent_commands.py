"""Every command says one sentence, and ends with exit code 2, when nobody answers or is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import typer

import raykv
from raykv.base.errors import ClusterError
from raykv.base.ids import Generation, Key, Namespace
from raykv.cli import app, main
from raykv.client import pools as deployment
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.node.disk.chunk_file import ChunkBytes, write_chunks
from raykv.node.wishes import RayNode
from raykv.protocol.events import PublisherSettings
from raykv.stream import publishing, readers

KEY = "00" * 36

ASKS: dict[str, list[str]] = {
    "status": [],
    "top": ["--once"],
    "ls": [],
    "show": [KEY],
    "lookup": ["[1,2,3]"],
    "events": [],
    "why-miss": ["request"],
    "plan": ["--live"],
    "pause": [],
    "resume": [],
    "set-weights-version": ["engine", "v2"],
    "clear": [],
    "clear named": ["ab"],
    "clear whole": ["ab" * 16],
    "pin": [KEY],
    "unpin": ["pin"],
    "pins": [],
    "quota set": ["acme", "--guaranteed", "0.2"],
    "quota remove": ["acme"],
    "quota list": [],
    "prefetch": [KEY, "--to", "node"],
    "move": [KEY, "--to", "node"],
    "export": ["folder", KEY],
    "import": ["chunks.safetensors"],
    "up": [],
    "session ls": [],
    "session show": ["agent"],
    "session over": ["agent"],
    "session pause": ["agent", "30s"],
    "session prefetch": ["agent"],
    "publish status": [],
    "publish start": ["tcp://127.0.0.1:5557"],
}
"""A command, and arguments with which it asks an actor something."""

OTHERS = {
    "doctor": "says what is silent, as a finding",
    "down": "ends actors that do not answer",
    "publish stop": "ends one that does not answer",
    "version": "asks nobody",
    "files": "asks nobody",
    "serve": "starts everything itself",
    "demo": "starts everything itself",
    "bench": "starts everything itself",
    "chaos": "starts everything itself",
}


class SilentActor:
    """Whatever it is asked, it does not answer."""

    def __getattr__(self, method: str) -> SilentActor:
        return self

    def remote(self, *_: object) -> object:
        return object()


def refuse(*_: object, **__: object) -> None:
    raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cluster whose actors are frozen."""
    actor = SilentActor()
    made = Cluster("10.0.0.1:6379", joined_here=False)
    monkeypatch.chdir(tmp_path)
    chunk = ChunkBytes(Key(bytes(36)), Generation(1), 0, np.zeros(4096, np.uint8))
    write_chunks(tmp_path / "chunks.safetensors", Namespace("model"), [chunk])
    for module in (raykv, raykv.client.cluster):
        monkeypatch.setattr(module, "connect", lambda _=None: made)
    joined = type("Joined", (), {"started": False, "address": made.address})
    monkeypatch.setattr(cluster, "ensure_cluster", lambda _: joined)
    monkeypatch.setattr(ask, "find_scheduler_actor", lambda: actor)
    monkeypatch.setattr(ask, "find_node_actor", lambda _: actor)
    monkeypatch.setattr(deployment, "scheduler_actor", lambda *_: actor)
    monkeypatch.setattr(ask, "named_actors", lambda: ["scheduler", "node:node"])
    monkeypatch.setattr(deployment, "live_nodes", lambda: [RayNode("node", "host", {}, {})])
    monkeypatch.setattr(deployment, "bring_up", lambda *_: [])
    monkeypatch.setattr(publishing, "find_publisher", lambda: actor)
    monkeypatch.setattr(readers, "READER_PATIENCE_S", 0.0)
    monkeypatch.setattr(ray, "get", refuse)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (list(refs), []))


@pytest.fixture
def missing(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray cluster in which RayKV does not run."""
    monkeypatch.setattr(ask, "find_scheduler_actor", lambda: None)
    monkeypatch.setattr(ask, "find_node_actor", lambda _: None)
    monkeypatch.setattr(ask, "named_actors", list)


def commands() -> Iterator[str]:
    """All there are."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from [name] if inner is None else [f"{name} {each}" for each in inner]


def run(monkeypatch: pytest.MonkeyPatch, command: str) -> int:
    words = [word for word in command.split() if word not in ("named", "whole")]
    monkeypatch.setattr(sys, "argv", ["raykv", *words, *ASKS[command]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_every_command_is_in_one_of_the_tables() -> None:
    asks = {command for command in ASKS if not command.startswith("clear ")}
    assert set(commands()) == asks | OTHERS.keys()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("command", ASKS)
def test_command_says_one_sentence_when_actors_are_silent(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("raykv: ")
    assert "not answer" in sentence


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("command", [each for each in ASKS if each not in ("up", "publish status")])
def test_command_says_one_sentence_when_raykv_does_not_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("raykv: ")
    assert "RayKV does not run in the Ray cluster at 10.0.0.1:6379" in sentence


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("command", ["down", "publish stop", "status"])
def test_command_says_one_sentence_when_ray_itself_does_not_answer(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((ask, "find_scheduler_actor"), (ask, "named_actors")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(publishing, "find_publisher", refuse)
    monkeypatch.setitem(ASKS, command, [])
    assert run(monkeypatch, command) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("raykv: ")
    assert "GetTimeoutError" in sentence


METHODS: dict[str, Callable[[Cluster], object]] = {
    "status": Cluster.status,
    "pause": Cluster.pause,
    "resume": Cluster.resume,
    "set_weights_version": lambda cluster: cluster.set_weights_version("engine", "v2"),
    "clear": Cluster.clear,
    "chunks": lambda cluster: list(cluster.chunks()),
    "chunk": lambda cluster: cluster.chunk(KEY),
    "lookup": lambda cluster: cluster.lookup([1, 2, 3]),
    "why_miss": lambda cluster: cluster.why_miss("request"),
    "more_room": Cluster.more_room,
    "requests": Cluster.requests,
    "events": lambda cluster: list(cluster.events(0, follow=False)),
    "snapshot": Cluster.snapshot,
    "tokens_of": lambda cluster: cluster.tokens_of([bytes(36)]),
    "publish": lambda cluster: cluster.publish(PublisherSettings("tcp://127.0.0.1:5557")),
    "publisher": Cluster.publisher,
    "pin": lambda cluster: cluster.pin([KEY]),
    "unpin": lambda cluster: cluster.unpin("pin"),
    "pins": Cluster.pins,
    "sessions": Cluster.sessions,
    "prefetch": lambda cluster: cluster.prefetch([KEY], "node"),
    "move": lambda cluster: cluster.move([KEY], "node"),
    "export_chunks": lambda cluster: cluster.export_chunks("folder", keys=[KEY]),
    "import_chunks": lambda cluster: cluster.import_chunks("chunks.safetensors"),
    "up": Cluster.up,
}

OTHER_METHODS = {
    "doctor": "has a finding for it",
    "hidden_states": "says that no node knows the request",
    "keep": "has a problem in each node's row",
    "down": "ends actors that do not answer",
    "stop_publishing": "ends one that does not answer",
    "close": "asks nobody",
    "session": "asks nobody, unlike the methods of what it returns",
}


def test_every_method_is_in_one_of_the_tables() -> None:
    public = {name for name in dir(Cluster) if not name.startswith("_")} - {"address"}
    assert public == METHODS.keys() | OTHER_METHODS.keys()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("method", METHODS)
def test_method_raises_a_cluster_error_when_actors_are_silent(method: str) -> None:
    with pytest.raises(ClusterError, match="not answer"):
        METHODS[method](raykv.connect())
