"""Every command says one sentence when it was used wrongly, nobody answers or nothing is there.

Its exit code is 1 if what was asked for is not there, and 2 otherwise.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raykv
from raykv.base.errors import ClusterError
from raykv.base.ids import Key, Namespace, Stamp
from raykv.cli import main, parser
from raykv.client import pools as deployment
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.lab import warden
from raykv.lab.bench.command import BENCHMARKS
from raykv.node.disk.chunk_file import ChunkBytes, write_chunks
from raykv.node.wishes import RayNode
from raykv.protocol.framing import encode
from raykv.protocol.operator import OrderAnswer, OrderState
from raykv.protocol.status import ClusterStatus
from raykv.stream import publishing, readers
from tests.fixtures.played_cluster import PlayedActor, play

KEY = "00" * 36

FINDS_NOTHING = 1
"""The exit code of a command where there is nothing of what it asks for."""

ASKS: dict[str, int | None] = {
    "status": 0,
    "top --once --interval 0.1": 0,
    f"chunk show {KEY}": FINDS_NOTHING,
    "chunk ls": FINDS_NOTHING,
    "chunk lookup --form tokens 1,2,3": FINDS_NOTHING,
    "events": None,
    "explain request": FINDS_NOTHING,
    "logs": None,
    "logs 3f9a": FINDS_NOTHING,
    "plan --live": FINDS_NOTHING,
    "pause": 0,
    "resume": 0,
    "engine weights engine v2": FINDS_NOTHING,
    "clear --all": 0,
    "clear ab": FINDS_NOTHING,
    f"clear {'ab' * 16}": 0,
    f"pin add {KEY}": FINDS_NOTHING,
    "pin rm pin": FINDS_NOTHING,
    "pin ls": 0,
    "quota set acme --guaranteed 0.2": 0,
    "quota rm acme": FINDS_NOTHING,
    "quota ls": 0,
    f"prefetch {KEY} --to node": FINDS_NOTHING,
    f"move {KEY} --to node": FINDS_NOTHING,
    f"export folder {KEY}": FINDS_NOTHING,
    "import chunks.safetensors": None,
    "up": None,
    "session ls": FINDS_NOTHING,
    "session show agent": FINDS_NOTHING,
    "session over agent": FINDS_NOTHING,
    "session pause agent 30s": FINDS_NOTHING,
    "session prefetch agent": FINDS_NOTHING,
    "publish status": FINDS_NOTHING,
    "publish start tcp://127.0.0.1:5557": None,
}
"""Commands that ask an actor something, and how each ends where nothing has happened yet.

None: that takes actors that answer more.
"""

OTHERS = {
    *("doctor", "settings", "down", "publish stop"),
    *("files", "serve", "demo", "chaos"),
    *(f"bench {each}" for each in (*BENCHMARKS, "claims")),
}
"""Commands that say or do something where actors are silent, and those that ask none."""

NO_KEYS = ["xyz", "ab" * 200, "@/nowhere", "tokens:1,x"]

WRONG = {
    "chunk ls": ["--sort colour", "--tier tape"],
    "chunk show": ["xyz", "ab" * 200],
    "chunk lookup": ["@/nowhere", "x --trait salt=y"],
    "events": ["--since -1", f"--since 1:{1 << 63}"],
    "settings": ["--set x", "--set pool_size=1", "--set pin_share=2"],
    "engine weights": ["engine ''"],
    "pin add": [*NO_KEYS, *(f"{KEY} {x}" for x in ("--ttl soon", "--ttl 31d", "--ttl 0s"))],
    "prefetch": [f"{keys} --to n" for keys in NO_KEYS],
    "move": ["xyz --to n"],
    "quota set": [
        "acme --guaranteed 2",
        "acme --guaranteed 0.5 --most 0.2",
        "acme --salt-file /nowhere",
        "others --tenant acme",
        "a" * 300,
    ],
    "session show": ["s" * 200],
    "session over": ["s" * 200],
    "session pause": ["agent soon", "agent 2h", f"{'s' * 200} 30s"],
    "session prefetch": ["s" * 200],
    "export": ["/proc/self/status", "folder xyz", "folder --hottest much"],
    "import": ["/nowhere", "/proc/self/status"],
    "up": ["--pool-bytes much", "--slab-bytes much"],
    "publish start": [
        "nowhere",
        "tcp://*:1 --format xml",
        "tcp://*:1 --replay tcp://",
        "tcp://*:1 --hashes hex",
        *(f"tcp://*:1 --topic={topic}" for topic in ("{pod}", "{node!r}", "kv@{", "kv@{}")),
    ],
    "down": ["--purge"],
    "serve": ["/nowhere", "model --pool-bytes much"],
    "demo": ["--pool-bytes x", "--json /nowhere/x.json"],
    "bench client": ["--system lmcache", "--json /nowhere/x.json"],
    "chaos": ["--fault nothing", "--json /nowhere/x.json"],
}
"""What must be refused before a cluster is looked for, started or joined."""


def refuse(*_: object, **__: object) -> None:
    raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cluster whose actors are frozen."""
    play(monkeypatch, {}, {"node": {}})
    made = Cluster("10.0.0.1:6379", joined_here=False)
    monkeypatch.chdir(tmp_path)
    chunk = ChunkBytes(Key(bytes(36)), Stamp(0, 0), 0, np.zeros(4096, np.uint8))
    write_chunks(tmp_path / "chunks.safetensors", Namespace("model"), [chunk])
    for module in (raykv, raykv.client.cluster):
        monkeypatch.setattr(module, "connect", lambda _=None: made)
    joined = type("Joined", (), {"started": False, "address": made.address})
    monkeypatch.setattr(cluster, "ensure_cluster", lambda _: joined)
    monkeypatch.setattr(deployment, "scheduler_actor", lambda *_: ask.find_scheduler_actor())
    monkeypatch.setattr(ask, "named_actors", lambda: ["scheduler", "node:node"])
    monkeypatch.setattr(deployment, "live_nodes", lambda: [RayNode("node", "host", {}, {})])
    monkeypatch.setattr(deployment, "bring_up", lambda *_: [])
    monkeypatch.setattr(publishing, "find_publisher", lambda: PlayedActor({}))
    monkeypatch.setattr(readers, "READER_PATIENCE_S", 0.0)


@pytest.fixture
def missing(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray cluster in which RayKV does not run."""
    monkeypatch.setattr(ask, "find_scheduler_actor", lambda: None)
    monkeypatch.setattr(ask, "find_node_actor", lambda _: None)
    monkeypatch.setattr(ask, "node_actors", dict)
    monkeypatch.setattr(ask, "named_actors", list)


def commands() -> Iterator[str]:
    """All there are."""
    for name, command in parser().commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name
        else:
            yield from (f"{name} {each}" for each in inner if not inner[each].hidden)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["raykv", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def command_of(words: str) -> str:
    """Which of all it is."""
    return next(each for each in commands() if f"{words} ".startswith(f"{each} "))


def test_every_command_is_in_one_of_the_tables() -> None:
    assert set(commands()) == {command_of(words) for words in ASKS} | OTHERS


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
    found = parser()
    for word in command.split():
        found = found.commands[word]
    return any(name in each.opts and each.is_flag == is_flag for each in found.params)


def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    *more: str,
) -> str:
    """What is said on standard error of a wrong use; the same with `--json`, as JSON too."""
    words = [*command.split(), *more]
    assert run(monkeypatch, *words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    if has_switch(command_of(command), "--json", is_flag=True):
        assert run(monkeypatch, *words, "--json") == 2
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
    # vLLM takes what `serve` does not know.
    general = [] if command == "serve" else ["--nonsense"]
    for words in [*WRONG.get(command, []), *general]:
        assert refused(monkeypatch, capsys, command, *shlex.split(words))


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(
    "words",
    [
        "top --interval 0",
        "plan model --tokens 0",
        "chunk ls --limit 0",
        "up --timeout 0",
        "chaos --minutes 0",
        "demo --nodes 3",
        f"pin add {KEY} --priority 10",
    ],
)
def test_number_outside_its_range_is_refused_with_the_option(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option = words.split()[-2]
    assert f"Invalid value for '{option}'" in refused(monkeypatch, capsys, words)


ADDRESSES = {
    "http://10.0.0.1:8265": "Ray's dashboard",
    "https://ray.example.org": "Ray's dashboard",
    "ray://10.0.0.1:10001": "Ray Client",
    "10.0.0.1": "host:port",
    "head:many": "host:port",
}


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(
    "words", [*ASKS, "doctor", "settings", "down", "publish stop", "demo", "serve ."]
)
def test_address_of_another_kind_is_refused_with_what_is_meant(
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    chunk = ChunkBytes(Key(bytes(36)), Stamp(0, 0), 0, np.zeros(4096, np.uint8))
    write_chunks(tmp_path / "chunks.safetensors", Namespace("model"), [chunk])
    # What is meant is the same for all commands.
    for address, meant in [*ADDRESSES.items()][: None if words == "status" else 1]:
        said = refused(monkeypatch, capsys, words, "--address", address)
        assert meant in said
        assert address in said


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("command", ["up", "settings"])
def test_invalid_variable_is_refused_before_a_cluster_is_looked_for(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYKV_LAYERWISE_LOADS", "ja")
    assert "must be true or false" in refused(monkeypatch, capsys, command)


@pytest.mark.usefixtures("unasked")
def test_address_of_another_kind_in_the_environment_is_refused_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    said = refused(monkeypatch, capsys, "status")
    assert "RAY_ADDRESS='http://10.0.0.1:8265'" in said


NOTHING: dict[str, Any] = {
    "status": encode(ClusterStatus("10.0.0.1:6379", 1, "1.0", paused=False)),
    "orders": b"",
    "order": encode(OrderAnswer()),
    "order_state": encode(OrderState(Stamp(1, 1))),
}
"""What a scheduler actor answers that has heard of nobody."""


@pytest.fixture
def empty(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster in which nothing has happened yet."""
    play(monkeypatch, {name: lambda *_, answer=answer: answer for name, answer in NOTHING.items()})
    monkeypatch.setattr(ask, "named_actors", lambda: ["scheduler"])
    monkeypatch.setattr(publishing, "find_publisher", lambda: None)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("words", [words for words, code in ASKS.items() if code is not None])
def test_command_ends_as_it_should_where_nothing_has_happened(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ASKS[words]
    assert run(monkeypatch, *words.split()) == code
    printed = capsys.readouterr()
    if code == FINDS_NOTHING:
        assert len((printed.out + printed.err).splitlines()) == 1
    assert run(monkeypatch, *words.split(), "--json") == code
    json.loads(capsys.readouterr().out)


def sentence_of(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command that fails says, which is one line."""
    assert run(monkeypatch, *words.split()) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("raykv: ")
    return sentence


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("words", ASKS)
def test_command_says_one_sentence_when_actors_are_silent(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not answer" in sentence_of(words, monkeypatch, capsys)


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("words", [each for each in ASKS if each not in ("up", "publish status")])
def test_command_says_one_sentence_when_raykv_does_not_run(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sentence_of(words, monkeypatch, capsys)
    assert "RayKV does not run in the Ray cluster at 10.0.0.1:6379" in said


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("words", ["down", "publish stop", "status"])
def test_command_says_one_sentence_when_ray_itself_does_not_answer(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((ask, "find_scheduler_actor"), (ask, "named_actors")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(publishing, "find_publisher", refuse)
    assert "Ray's head node does not answer" in sentence_of(words, monkeypatch, capsys)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "method", [Cluster.requests, Cluster.snapshot], ids=["requests", "snapshot"]
)
def test_method_that_no_command_calls_raises_a_cluster_error_when_actors_are_silent(
    method: Callable[[Cluster], object],
) -> None:
    with pytest.raises(ClusterError, match="not answer"):
        method(raykv.connect())
