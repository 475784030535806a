"""What holds for all commands: help with an example, JSON, exit codes, plain text on a pipe."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import raykv
from raykv import cli
from raykv.base.errors import ClusterError, SettingError
from raykv.cli import app, base, chunks, main, quota, rates, switch
from raykv.cli.base import EXIT_CODES, ago
from raykv.lab import commands
from raykv.protocol.events import BlockStored, Event, NodeLost
from raykv.protocol.operator import TransferResult
from raykv.protocol.reader import ORDERS, TIERS, Chunk, NodePrefix, PromptChunk, PromptLookup
from raykv.protocol.status import ClusterStatus, MoreRoom, NamespaceStatus
from tests.fixtures.statuses import engine, node


def all_commands(group: Any, before: str = "") -> dict[str, Any]:
    """By name; those of a group have its name in front."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        found |= all_commands(command, f"{name} ") if is_group else {before + name: command}
    return found


COMMANDS = all_commands(get_command(app))

PRINTS_NO_JSON = {"serve"}
"""It is vLLM's server. `demo`, `bench` and `chaos` write their JSON to a file, or to "-"."""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_command_has_an_example_of_it(name: str) -> None:
    text = COMMANDS[name].help
    assert f"Example: raykv {name}" in text


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - PRINTS_NO_JSON))
def test_every_command_that_prints_can_print_json(name: str) -> None:
    options = {option for each in COMMANDS[name].params for option in each.opts}
    assert "--json" in options


def test_exit_codes_are_in_the_help() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=300)
    assert " ".join(EXIT_CODES.split()) in " ".join(shown.output.split())


class PlayedCluster:
    """Answers as a cluster would; `failure` is raised by every question."""

    address = "played:1"

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.asked: list[dict[str, Any]] = []
        self.found: list[Chunk] = []
        self.on_disk = 0
        self.told: list[Event] = []

    def __enter__(self) -> PlayedCluster:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _answer(self, **asked: Any) -> None:
        self.asked.append(asked)
        if self.failure is not None:
            raise self.failure

    def chunks(self, **asked: Any) -> list[Chunk]:
        self._answer(**asked)
        return self.found

    def chunk(self, key: str) -> list[Chunk]:
        self._answer(key=key)
        return self.found

    def status(self) -> ClusterStatus:
        self._answer()
        space = NamespaceStatus("5f0c", "tiny", 2, None, 1)
        return ClusterStatus("a", 1, "1.0", False, [node(5)], [engine()], spaces=[space])

    def events(self, since: Any, *, follow: bool) -> list[Event]:
        self._answer(since=since, follow=follow)
        return self.told

    def lookup(self, tokens: Any = None, **asked: Any) -> PromptLookup:
        self._answer(tokens=tokens, **asked)
        found = bool(self.found)
        return PromptLookup(
            namespace="5f0c",
            model="tiny",
            prompt_tokens=40,
            cached_tokens=32 if found else 0,
            nodes=[NodePrefix(node_id="n", tokens=32, chunks=1)] if found else [],
            chunks=[
                PromptChunk(
                    key=b"k" * 36, group=0, first_token=0, end_token=32, nodes=["n"] * found
                )
            ],
            disk_tokens=self.on_disk,
        )

    def clear(self, namespace: str | None, *, watch: Any) -> None:
        self._answer(gone=namespace)

    def down(self) -> int:
        self._answer(gone="all")
        return 3

    def more_room(self) -> MoreRoom:
        self._answer()
        return MoreRoom(
            window_s=1800.0,
            nodes=2,
            pool_bytes=16 << 30,
            prompt_tokens=9000,
            computed_tokens=4000,
            more_bytes=[1 << 29, 1 << 30, 1 << 31],
            saved_tokens=[500, 1000, 1500],
            reach_bytes=1 << 30,
        )

    def prefetch(self, keys: Any, node_id: str, **asked: Any) -> TransferResult:
        self._answer(keys=keys, node_id=node_id, **asked)
        return TransferResult(asked=len(keys), came=len(keys))


CHUNK = Chunk(
    key=b"\x01" * 32 + bytes(4),
    node_id="n" * 56,
    namespace="5f0c" * 8,
    model="tiny",
    group=0,
    num_bytes=1 << 20,
    age_s=7300.0,
    idle_s=5.0,
    hits=1234,
    is_replicated=True,
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> PlayedCluster:
    made = PlayedCluster()
    monkeypatch.setattr(raykv, "connect", lambda _: made)
    return made


def run(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
    """Standard output of a command; with `main`, as the shell calls it."""
    shown = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
    assert shown.exit_code == code, shown.output
    return shown.stdout


def test_ls_and_show_name_tenants_where_there_are_some(cluster: PlayedCluster) -> None:
    cluster.found = [CHUNK, msgspec.structs.replace(CHUNK, tenant="acme")]
    head, *rows = run("ls").splitlines()
    assert head.split()[4] == "tenant"
    assert ["acme" in row for row in rows] == [False, True]
    assert "of tenant acme" in run("show", "01")


def test_ls_prints_a_line_for_each_chunk_however_long(cluster: PlayedCluster) -> None:
    cluster.found = [CHUNK]
    head, row = run("ls", "--limit", "5", "--sort", "hits").splitlines()
    columns = [
        "key",
        "group",
        "namespace",
        "node",
        "tier",
        "size",
        "age",
        "unused",
        "for",
        "hits",
        "copies",
    ]
    assert head.split() == columns
    assert row.split()[0] == CHUNK.key.hex()[: chunks.SHOWN_DIGITS]
    assert "1.0 MiB" in row
    assert "2.0 h" in row
    assert "1,234" in row
    assert cluster.asked == [
        {"namespace": None, "node": None, "group": None, "order": "hits", "limit": 5, "tier": ""}
    ]


def test_chunk_on_a_disk_is_shown_as_such(cluster: PlayedCluster) -> None:
    cluster.found = [CHUNK, msgspec.structs.replace(CHUNK, tier="disk", hits=0)]
    _, in_ram, on_disk = run("ls", "--tier", "disk").splitlines()
    assert ("ram" in in_ram.split(), "disk" in on_disk.split()) == (True, True)
    assert cluster.asked[-1]["tier"] == "disk"
    assert [row["tier"] for row in json.loads(run("ls", "--json"))] == ["ram", "disk"]
    shown = run("show", "01")
    assert "1.0 MiB in its pool, came 2.0 h ago, unused for" in shown
    assert "1.0 MiB on its disk, namespace" in shown


@pytest.mark.parametrize(
    ("group", "traits", "expected"),
    [
        (1, {"chunks": "0:32 1:32/3"}, "1, chunks of 32 tokens: a prefix needs the last 3"),
        (0, {"chunks": "0:32 1:32/3"}, "0, chunks of 32 tokens: a prefix needs all"),
        (
            0,
            {"chunks": "0:96/1 1:96", "state_groups": "0"},
            "0, chunks of 96 tokens: a prefix needs the last, a recurrent state",
        ),
        (2, {"chunks": "0:32"}, "2"),
        (2, {}, "2"),
    ],
)
def test_chunk_is_shown_with_what_its_group_is(
    group: int, traits: dict[str, str], expected: str
) -> None:
    assert chunks.group_text(group, traits) == expected


def test_lookup_leaves_out_windows_that_are_nowhere_and_not_needed(
    cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        PromptChunk(
            key=name * 36, group=1, first_token=0, end_token=32, nodes=nodes, is_needed=is_needed
        )
        for name, nodes, is_needed in ((b"w", ["n"], False), (b"x", [], False), (b"y", [], True))
    ]
    cluster.found = [CHUNK]
    told = msgspec.structs.replace(cluster.lookup(), chunks=rows)
    monkeypatch.setattr(cluster, "lookup", lambda **_: told)
    shown = run("lookup", "1,2", "--form", "tokens")
    digits = [each.key.hex()[: chunks.SHOWN_DIGITS] for each in rows]
    assert [each in shown for each in digits] == [True, False, True]
    assert "1 chunks of windows and states are nowhere, and not needed" in shown


def test_lookup_tells_tokens_in_ram_and_on_disk(cluster: PlayedCluster) -> None:
    cluster.found = [CHUNK]
    assert "32 of 40 tokens can be loaded\n" in run("lookup", "1,2", "--form", "tokens")
    cluster.on_disk = 16
    shown = run("lookup", "1,2", "--form", "tokens")
    assert "32 of 40 tokens can be loaded: 16 from RAM, 16 from disk" in shown
    found = json.loads(run("lookup", "1,2", "--form", "tokens", "--json"))
    assert (found["cached_tokens"], found["disk_tokens"]) == (32, 16)
    assert found["nodes"][0]["disk_chunks"] == 0
    assert found["chunks"][0]["disks"] == []


def test_nothing_found_is_an_answer_with_code_1(cluster: PlayedCluster) -> None:
    assert run("ls", code=1) == "no chunks\n"
    assert "no node has a chunk" in run("show", "ab", code=1)
    assert json.loads(run("show", "ab", "--json", code=1)) == []
    assert "0 of 40 tokens" in run("lookup", "1,2", "--form", "tokens", code=1)


def test_json_has_keys_as_digits(cluster: PlayedCluster) -> None:
    cluster.found = [CHUNK]
    (row,) = json.loads(run("ls", "--json"))
    assert row["key"] == CHUNK.key.hex()
    assert row["hits"] == 1234
    (row,) = json.loads(run("show", "01", "--json"))
    assert row["is_replicated"]
    found = json.loads(run("lookup", "[1, 2]", "--form", "tokens", "--json"))
    assert found["chunks"][0]["key"] == (b"k" * 36).hex()
    assert cluster.asked[-1]["tokens"] == [1, 2]


def test_operations_take_keys_and_prompts(cluster: PlayedCluster, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Hello")
    found = json.loads(run("prefetch", "ab12", f"text:@{prompt}", "--to", "n", "--json"))
    assert found["came"] == 2
    looked_up, asked = cluster.asked
    assert looked_up == {"tokens": None, "text": "Hello", "namespace": None}
    assert asked["keys"] == [bytes.fromhex("ab12"), b"k" * 36]


def test_lookup_reads_a_prompt_in_any_form(cluster: PlayedCluster, tmp_path: Path) -> None:
    cluster.found = [CHUNK]
    chat = tmp_path / "chat.json"
    messages = [{"role": "user", "content": "Hello"}]
    chat.write_text(json.dumps({"messages": messages}))
    traits = ["--trait", "cache_salt=s", "--trait", "lora=fr=/adapters/fr"]
    run("lookup", "Hello", "--model", "tiny", *traits)
    run("lookup", "-", stdin="from a pipe")
    run("lookup", f"@{chat}", "--form", "chat")
    texts = [{name: each.get(name) for name in ("text", "messages")} for each in cluster.asked]
    assert texts == [
        {"text": "Hello", "messages": None},
        {"text": "from a pipe", "messages": None},
        {"text": None, "messages": messages},
    ]
    assert cluster.asked[0]["traits"] == raykv.PromptTraits("s", "fr", "/adapters/fr")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1,x", "--form", "tokens"], "can't be read as tokens"),
        (["{}", "--form", "chat"], "can't be read as chat: KeyError"),
        (["[1]", "--form", "chat"], "can't be read as chat"),
        (["@/nowhere/at/all"], "can't be read as text: FileNotFoundError"),
        (["x", "--trait", "salt=y"], "give cache_salt=TEXT or lora=NAME=PATH"),
        (["x", "--trait", "lora=y"], "give cache_salt=TEXT or lora=NAME=PATH"),
    ],
)
def test_prompt_that_can_not_be_read_is_refused(
    cluster: PlayedCluster, arguments: list[str], expected: str
) -> None:
    with pytest.raises(SettingError, match=expected):
        run("lookup", *arguments)
    assert cluster.asked == []


def test_status_and_top_are_plain_text_on_a_pipe(cluster: PlayedCluster) -> None:
    text = run("status")
    assert "\x1b" not in text
    assert "tiny" in text
    # It ends although nobody said --once.
    text = run("top", "--interval", "0.1")
    assert "loaded by RayKV" in text
    assert "\x1b" not in text
    assert json.loads(run("top", "--json", "--interval", "0.1"))["progress"]["seconds"] > 0


def test_events_are_printed_as_they_come(cluster: PlayedCluster) -> None:
    at_node: dict[str, Any] = {"life": 4, "node_id": "n", "node_life": 3}
    stored = BlockStored(seq=7, number=9, namespace="5f", key=b"\xab" * 36, **at_node)
    cluster.told = [stored, NodeLost(seq=8, time=1.7e9, number=0, **at_node)]
    first, second = run("events").splitlines()
    assert first.startswith("4:7 BlockStored node_id=n node_life=3 number=9 namespace=5f key=abab")
    moment, second = second[:20], second[20:]
    assert moment == f"{datetime.fromtimestamp(1.7e9):%Y-%m-%d %H:%M:%S} "
    assert second == "4:8 NodeLost node_id=n node_life=3 number=0"
    rows = [json.loads(line) for line in run("events", "--json", "-f").splitlines()]
    assert rows[0]["event"] == "BlockStored"
    assert rows[0]["key"] == "ab" * 36
    run("events", "--since", "4:7")
    run("events", "--since", "7")
    places = [(each["since"], each["follow"]) for each in cluster.asked]
    assert places == [(0, False), (None, True), ((4, 7), False), (7, False)]
    with pytest.raises(SettingError, match="LIFE:NUMBER"):
        run("events", "--since", "yesterday")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["show", "ab"],
        ["lookup", "x"],
        ["events", "--json"],
        ["status", "--json"],
        ["top", "--once"],
    ],
)
def test_failure_is_a_sentence_on_standard_error_and_code_2(
    arguments: list[str],
    cluster: PlayedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.failure = ClusterError("nobody [there] answers")
    monkeypatch.setattr(sys, "argv", ["raykv", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    said = {"error": "nobody [there] answers", "exit_code": 2}
    assert (json.loads(printed.out) if "--json" in arguments else printed.out) == (
        said if "--json" in arguments else ""
    )
    assert printed.err == "raykv: nobody [there] answers\n"


@pytest.mark.parametrize(
    "arguments",
    [["ls", "--limit", "0"], ["ls", "--sort"], ["nothing"], ["top", "--interval", "0"]],
)
def test_wrong_usage_ends_with_2(cluster: PlayedCluster, arguments: list[str]) -> None:
    run(*arguments, code=2)
    assert cluster.asked == []


def test_plan_says_whether_settings_fit(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from tests.fixtures.model_configs import LLAMA

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = str(tmp_path)
    found = json.loads(run("plan", model, "--set", "pool_bytes=64MiB", "--json"))
    assert found["bytes_per_token"] == 512
    assert found["pool"]["pool_bytes"] == 64 << 20
    text = run("plan", model, "--set", "pool_bytes=4KiB", "--engine", "block-size=32", code=1)
    assert "a chunk     16.0 KiB" in text
    assert "wrong: a pool of 4.0 KiB has no room for a chunk of 16.0 KiB" in text
    with pytest.raises(SettingError, match="give NAME=VALUE"):
        run("plan", model, "--set", "pool_bytes")


def test_live_plan_says_what_one_more_gib_saves(cluster: PlayedCluster) -> None:
    text = run("plan", "--live")
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert "last 30 min had 9,000 prompt tokens, of which 4,000 were computed" in text
    assert text.startswith("2 pools of 8.0 GiB on average;")
    assert {
        "512.0 MiB 1,000 12.5%",
        "1.0 GiB 2,000 25.0%",
        "2.0 GiB at least 3,000 37.5%",
        "one more GiB in each pool would save 2,000 computed tokens per hour",
    } <= rows
    found = json.loads(run("plan", "--live", "--json"))
    assert found["saved_tokens_per_hour"] == [1000, 2000, 3000]
    assert found["computed_tokens"] == 4000


@pytest.mark.parametrize("arguments", [[], ["model", "--live"]])
def test_plan_is_about_a_model_or_the_live_cluster(
    cluster: PlayedCluster, arguments: list[str]
) -> None:
    with pytest.raises(SettingError, match="either a model, or --live"):
        run("plan", *arguments)
    assert cluster.asked == []


def test_interrupted_follower_ends_well(
    cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> list[Event]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "events", interrupted)
    assert run("events", "--follow") == ""


def test_times_are_short_words() -> None:
    assert [ago(seconds) for seconds in (0.4, 119, 120, 7300, 200_000)] == [
        "0 s",
        "119 s",
        "2 min",
        "2.0 h",
        "2.3 d",
    ]


def test_every_topic_adds_commands() -> None:
    topics = {f"{cli.__name__}.{each.name}" for each in pkgutil.iter_modules(cli.__path__)}
    shared = {base.__name__, rates.__name__}
    groups = [group.typer_instance for group in app.registered_groups if group.typer_instance]
    owners = {
        command.callback.__module__
        for each in (app, *groups)
        for command in each.registered_commands
        if command.callback
    }
    assert topics - shared | {commands.__name__} == owners


def test_help_imports_neither_ray_nor_vllm() -> None:
    code = (
        "import sys; from raykv.cli import app; from typer.main import get_command; "
        "get_command(app); print(*sys.modules.keys() & {'ray', 'torch', 'vllm', 'transformers'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ([], {"RAYKV_LAYERWISE_LOADS": "ja"}, "must be true or false"),
        (["--pool-bytes", "much"], {}, "--pool-bytes"),
        (["--slab-bytes", "much"], {}, "--slab-bytes"),
    ],
)
def test_up_starts_no_ray_for_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, options: list[str], environment: dict[str, str], said: str
) -> None:
    started: list[str | None] = []
    monkeypatch.setattr("raykv.cluster.join.ensure_cluster", started.append)
    done = CliRunner().invoke(app, ["up", *options], env=environment)
    assert isinstance(done.exception, SettingError)
    assert said in str(done.exception)
    assert not started


@pytest.mark.parametrize(
    ("label", "counters", "is_said"),
    [
        ("acme", {"prompt_tokens": 1}, True),
        ("acme", {"prompt_tokens": 1, "tenants_by_server": 1}, False),
        ("acme", {}, False),
        ("salt:0123", {"prompt_tokens": 1}, False),
        ("", {"prompt_tokens": 1}, False),
    ],
)
def test_quota_of_a_tenant_that_nobody_can_be_is_warned_of(
    label: str, counters: dict[str, int], is_said: bool
) -> None:
    said = quota.nobodys(label, [engine("e", **counters)])
    assert bool(said) == is_said
    assert ("tenant_source=server" in said) == is_said


def test_choices_of_a_listing_are_those_of_the_cluster() -> None:
    assert tuple(chunks.Order) == tuple(ORDERS)
    assert tuple(chunks.Tier) == TIERS


def test_version_is_an_option_too() -> None:
    assert run("--version") == f"{raykv.__version__}\n" == run("version")


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("command", ["clear", "down"])
def test_person_is_asked_before_something_goes(
    cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch, command: str, answer: str
) -> None:
    def asks(*, yes: bool) -> bool:
        return not yes

    monkeypatch.setattr(switch, "asks", asks)
    shown = CliRunner().invoke(app, [command], input=f"{answer}\n")
    assert "chunks" in shown.stderr
    assert "Go on? [y/N]" in shown.stderr
    assert shown.exit_code == (0 if answer == "y" else 1)
    assert any("gone" in each for each in cluster.asked) == (answer == "y")
    shown = CliRunner().invoke(app, [command, "--yes"])
    assert shown.exit_code == 0
    assert "Go on?" not in shown.stderr


def test_nobody_is_asked_on_a_pipe(cluster: PlayedCluster) -> None:
    assert run("clear") == "cleared\n"


def test_purge_removes_what_is_left_on_this_host_and_no_cache(
    cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, pool = tmp_path / "session", tmp_path / "pool"
    session.mkdir()
    pool.write_bytes(b"KV")
    (session / "a log").write_text("")
    monkeypatch.setattr("raykv.metrics.discovery.session_folder", lambda: session)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache/raykv/smollm2").mkdir(parents=True)
    stopped: list[str] = []
    monkeypatch.setattr("raykv.cluster.join.stop_started", stopped.append)
    told = json.loads(run("down", "--with-ray", "--purge", "--json"))
    assert stopped == ["played:1"]
    assert told["removed"] == [str(session), str(tmp_path / "cache/raykv")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "pool"]
