"""Every command says one sentence when it was used wrongly, nobody answers or nothing is there.

Its exit code is 1 if what was asked for is not there, and 2 otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import typer

import raykv
from raykv.base.errors import ClusterError
from raykv.base.ids import Key, Namespace, Stamp
from raykv.cli import app, main
from raykv.client import pools as deployment
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.lab import warden
from raykv.node.disk.chunk_file import ChunkBytes, write_chunks
from raykv.node.wishes import RayNode
from raykv.protocol.events import PublisherSettings
from raykv.protocol.framing import encode
from raykv.protocol.operator import OrderAnswer, OrderState
from raykv.protocol.status import ClusterStatus
from raykv.stream import publishing, readers

KEY = "00" * 36

GROUP: Any = typer.main.get_command(app)

ASKS: dict[str, list[str]] = {
    "status": [],
    "top": ["--once"],
    "ls": [],
    "show": [KEY],
    "lookup": ["[1,2,3]"],
    "events": [],
    "why-miss": ["request"],
    "logs": [],
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


WRONG: dict[str, list[list[str]]] = {
    "ls": [["--sort", "colour"], ["--tier", "tape"], ["--limit", "0"], ["--group", "-1"]],
    "show": [[], ["xyz"], ["ab" * 200]],
    "lookup": [["1,x", "--form", "tokens"], ["@/nowhere"], ["x", "--trait", "salt=y"]],
    "events": [["--since", "yesterday"], ["--since", "-1"], ["--since", f"1:{1 << 63}"]],
    "top": [["--interval", "0"]],
    "plan": [[], ["model", "--live"], ["model", "--set", "x"], ["model", "--tokens", "0"]],
    "set-weights-version": [["engine"], ["engine", ""]],
    "pin": [
        [],
        ["xyz"],
        ["ab" * 200],
        [KEY, "--ttl", "soon"],
        [KEY, "--ttl", "31d"],
        [KEY, "--ttl", "0s"],
        [KEY, "--priority", "10"],
        ["@/nowhere"],
        ["tokens:1,x"],
    ],
    "unpin": [[]],
    "prefetch": [["xyz", "--to", "n"], [KEY], [KEY, "--to", "n", "--timeout", "0"]],
    "move": [["xyz", "--to", "n"], [KEY], [KEY, "--to", "n", "--timeout", "0"]],
    "quota set": [
        [],
        ["acme", "--guaranteed", "2"],
        ["acme", "--guaranteed", "0.5", "--most", "0.2"],
        ["acme", "--salt-file", "/nowhere"],
        ["others", "--tenant", "acme"],
        ["a" * 300],
    ],
    "quota remove": [[]],
    "session show": [[], ["s" * 200]],
    "session over": [[], ["s" * 200]],
    "session pause": [["agent"], ["agent", "soon"], ["agent", "2h"], ["s" * 200, "30s"]],
    "session prefetch": [[], ["s" * 200], ["agent", "--timeout", "0"]],
    "export": [[], ["/proc/self/status"], ["folder", "xyz"], ["folder", "--hottest", "much"]],
    "import": [[], ["/nowhere"], ["/proc/self/status"]],
    "up": [["--pool-bytes", "much"], ["--slab-bytes", "much"], ["--timeout", "0"]],
    "publish start": [
        [],
        ["nowhere"],
        ["tcp://*:1", "--format", "xml"],
        ["tcp://*:1", "--replay", "tcp://"],
        ["tcp://*:1", "--hashes", "hex"],
        *[["tcp://*:1", f"--topic={topic}"] for topic in ("{pod}", "{node!r}", "kv@{", "kv@{}")],
    ],
    "why-miss": [[]],
    "logs": [["a", "b"]],
    "down": [["--purge"]],
    "serve": [[], ["/nowhere"], ["model", "--pool-bytes", "much"]],
    "demo": [["--pool-bytes", "x"], ["--nodes", "3"], ["--json", "/nowhere/x.json"]],
    "bench": [["nothing"], ["lookup"], ["policy"], ["copy", "--system", "plain"]],
    "chaos": [["--fault", "nothing"], ["--minutes", "0"], ["--json", "/nowhere/x.json"]],
}
"""What must be refused before a cluster is looked for, started or joined."""

TAKES_ALL_WORDS = {"serve"}
"""Unknown options are vLLM's."""

ABSENT: dict[str, list[str]] = {
    "ls": [],
    "show": [KEY],
    "lookup": ["1,2,3", "--form", "tokens"],
    "why-miss": ["request"],
    "logs": ["3f9a"],
    "set-weights-version": ["engine", "v2"],
    "clear": ["ab"],
    "pin": [KEY],
    "unpin": ["pin"],
    "quota remove": ["acme"],
    "prefetch": [KEY, "--to", "node"],
    "move": [KEY, "--to", "node"],
    "export": ["folder"],
    "session ls": [],
    "session show": ["agent"],
    "session over": ["agent"],
    "session pause": ["agent", "30s"],
    "session prefetch": ["agent"],
    "publish status": [],
    "publish stop": [],
}
"""What is not there in a cluster whose scheduler actor has heard of nobody."""


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
    chunk = ChunkBytes(Key(bytes(36)), Stamp(0, 0), 0, np.zeros(4096, np.uint8))
    write_chunks(tmp_path / "chunks.safetensors", Namespace("model"), [chunk])
    for module in (raykv, raykv.client.cluster):
        monkeypatch.setattr(module, "connect", lambda _=None: made)
    joined = type("Joined", (), {"started": False, "address": made.address})
    monkeypatch.setattr(cluster, "ensure_cluster", lambda _: joined)
    monkeypatch.setattr(ask, "find_scheduler_actor", lambda: actor)
    monkeypatch.setattr(ask, "find_node_actor", lambda _: actor)
    monkeypatch.setattr(ask, "node_actors", lambda: {"node": actor})
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
    monkeypatch.setattr(ask, "node_actors", dict)
    monkeypatch.setattr(ask, "named_actors", list)


def commands() -> Iterator[str]:
    """All there are."""
    for name, command in GROUP.commands.items():
        inner = getattr(command, "commands", None)
        yield from [name] if inner is None else [f"{name} {each}" for each in inner]


def run(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: Sequence[str] | None = None
) -> int:
    words = [word for word in command.split() if word not in ("named", "whole")]
    given = ASKS[command] if arguments is None else arguments
    monkeypatch.setattr(sys, "argv", ["raykv", *words, *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_every_command_is_in_one_of_the_tables() -> None:
    asks = {command for command in ASKS if not command.startswith("clear ")}
    assert set(commands()) == asks | OTHERS.keys()


class NoWarden:
    """Watches nothing."""

    def note_actors(self, address: str) -> None: ...


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fail as soon as a cluster is looked for, or anything is started."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a cluster was looked for, or something was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("running_clusters", "check_reachable", "ensure_cluster"):
        monkeypatch.setattr(cluster, name, never)
    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setattr(subprocess, "Popen", never)
    # It would outlive a command that ends with an error, until these tests end.
    monkeypatch.setattr(warden, "ending_what_it_starts", lambda: nullcontext(NoWarden()))


def has_switch(command: str, name: str, *, is_flag: bool) -> bool:
    """Whether the command has an option of that name, and it takes a value or none."""
    found: Any = GROUP
    for word in command.split():
        found = found.commands[word]
    return any(name in each.opts and each.is_flag == is_flag for each in found.params)


def takes_address(command: str) -> bool:
    return has_switch(command, "--ray-address", is_flag=False)


def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: Sequence[str],
) -> str:
    """What is said on standard error of a wrong use; the same with `--json`, as JSON too."""
    assert run(monkeypatch, command, arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    if has_switch(command, "--json", is_flag=True):
        assert run(monkeypatch, command, [*arguments, "--json"]) == 2
        again = capsys.readouterr()
        error = json.loads(again.out)
        assert error["exit_code"] == 2
        assert error["error"]
        assert again.err == printed.err
    return printed.err


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("command", sorted(commands()))
def test_wrong_use_is_refused_before_a_cluster_is_looked_for(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    general = [] if command in TAKES_ALL_WORDS else [["--nonsense"]]
    if not WRONG.get(command):
        general.append(["one", "word", "too", "many"] if command != "clear" else ["a", "b"])
    for arguments in [*WRONG.get(command, []), *general]:
        assert refused(monkeypatch, capsys, command, arguments)


ADDRESSES = {
    "http://10.0.0.1:8265": "Ray's dashboard",
    "https://ray.example.org": "Ray's dashboard",
    "ray://10.0.0.1:10001": "Ray Client",
    "10.0.0.1": "host:port",
    "head:many": "host:port",
}


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("command", [each for each in sorted(commands()) if takes_address(each)])
def test_address_of_another_kind_is_refused_with_what_is_meant(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    chunk = ChunkBytes(Key(bytes(36)), Stamp(0, 0), 0, np.zeros(4096, np.uint8))
    write_chunks(tmp_path / "chunks.safetensors", Namespace("model"), [chunk])
    arguments = ASKS.get(command, [str(tmp_path)] if command == "serve" else [])
    # What is meant is the same for all commands.
    for address, meant in [*ADDRESSES.items()][: None if command == "status" else 1]:
        said = refused(monkeypatch, capsys, command, [*arguments, "--ray-address", address])
        assert meant in said
        assert address in said


@pytest.mark.usefixtures("unasked")
def test_address_of_another_kind_in_the_environment_is_refused_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    said = refused(monkeypatch, capsys, "status", [])
    assert "RAY_ADDRESS='http://10.0.0.1:8265'" in said


NOTHING: dict[str, Any] = {
    "status": encode(ClusterStatus("10.0.0.1:6379", 1, "1.0", paused=False)),
    "orders": b"",
    "order": encode(OrderAnswer()),
    "order_state": encode(OrderState(Stamp(1, 1))),
}
"""What a scheduler actor answers that has heard of nobody."""


class EmptyActor:
    """Answers so."""

    def __getattr__(self, method: str) -> Any:
        answer = NOTHING[method]
        return type("Method", (), {"remote": staticmethod(lambda *_: answer)})


@pytest.fixture
def empty(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster in which nothing has happened yet."""
    actor = EmptyActor()
    monkeypatch.setattr(ask, "find_scheduler_actor", lambda: actor)
    monkeypatch.setattr(ask, "find_node_actor", lambda _: None)
    monkeypatch.setattr(ask, "node_actors", dict)
    monkeypatch.setattr(ask, "named_actors", lambda: ["scheduler"])
    monkeypatch.setattr(publishing, "find_publisher", lambda: None)
    monkeypatch.setattr(ray, "get", lambda found, **_: found)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("command", ABSENT)
def test_what_is_not_there_is_exit_code_1(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, ABSENT[command]) == 1
    printed = capsys.readouterr()
    assert len((printed.out + printed.err).splitlines()) == 1
    assert run(monkeypatch, command, [*ABSENT[command], "--json"]) == 1
    json.loads(capsys.readouterr().out)


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
    assert "Ray's head node does not answer" in sentence


METHODS: dict[str, Callable[[Cluster], object]] = {
    "status": Cluster.status,
    "pause": Cluster.pause,
    "resume": Cluster.resume,
    "set_weights_version": lambda cluster: cluster.set_weights_version("engine", "v2"),
    "clear": Cluster.clear,
    "chunks": lambda cluster: list(cluster.chunks()),
    "chunk": lambda cluster: cluster.chunk(KEY),
    "lookup": lambda cluster: cluster.lookup([1, 2, 3]),
    "log": lambda cluster: list(cluster.log()),
    "why_miss": lambda cluster: cluster.why_miss("request"),
    "more_room": Cluster.more_room,
    "requests": Cluster.requests,
    "events": lambda cluster: list(cluster.events(0, follow=False)),
    "snapshot": Cluster.snapshot,
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
    "tokens_of": "says nothing of what only they know",
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
