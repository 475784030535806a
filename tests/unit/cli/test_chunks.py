"""What commands say of chunks and of prompts, and how they read keys and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import raykv
from raykv.base.errors import SettingError
from raykv.cli import chunks
from raykv.protocol.operator import TransferResult
from raykv.protocol.reader import Chunk, NodePrefix, PromptChunk, PromptLookup
from tests.fixtures.commands import AnsweringCluster, run

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
ON_DISK = replace(CHUNK, tier="disk", hits=0)

FOUND = PromptLookup(
    namespace="5f0c",
    model="tiny",
    prompt_tokens=40,
    cached_tokens=32,
    nodes=[NodePrefix(node_id="n", tokens=32, chunks=1)],
    chunks=[PromptChunk(key=b"k" * 36, group=0, first_token=0, end_token=32, nodes=["n"])],
    disk_tokens=0,
)


@pytest.fixture
def cluster(cluster: AnsweringCluster) -> AnsweringCluster:
    """It has a chunk, and finds it for a prompt."""
    cluster.answers |= {"chunks": [CHUNK], "chunk": [CHUNK], "lookup": FOUND}
    return cluster


def test_listing_is_a_line_for_each_chunk_however_long(cluster: AnsweringCluster) -> None:
    cluster.answers["chunks"] = [CHUNK, ON_DISK]
    head, in_ram, on_disk = run("chunk", "ls", "--limit", 5, "--sort", "hits").splitlines()
    heads = "key group namespace node tier size age unused for hits copies"
    assert " ".join(head.split()) == heads
    key = CHUNK.key.hex()[: chunks.SHOWN_DIGITS]
    place = f"{key} 0 5f0c5f0c5f0c nnnnnnnnnnnn"
    assert in_ram.split() == f"{place} ram 1.0 MiB 2.0 h 5 s 1,234 more".split()
    # Neither its age nor its hits are known.
    assert on_disk.split() == f"{place} disk 1.0 MiB more".split()
    asked = {"namespace": "", "node": None, "group": None, "order": "hits", "limit": 5, "tier": ""}
    assert cluster.was_asked("chunks") == [asked]


def test_listing_says_when_it_is_cut(cluster: AnsweringCluster) -> None:
    assert "only the first 1 chunks are listed" in run("chunk", "ls", "--limit", 1)
    run("chunk", "ls", "--tier", "disk")
    assert cluster.was_asked("chunks")[-1]["tier"] == "disk"


def test_chunk_is_shown_on_each_node_with_its_tier(cluster: AnsweringCluster) -> None:
    cluster.answers["chunk"] = [CHUNK, ON_DISK]
    shown = run("chunk", "show", "01")
    key = CHUNK.key.hex()
    assert shown.startswith(f"key         {key}\nblock hash  {key[:-8]}\nKV group    0\n")
    assert "1.0 MiB in its pool, came 2.0 h ago, unused for 5 s, 1,234 hits" in shown
    assert f"1.0 MiB on its disk, namespace {CHUNK.namespace} (tiny)" in shown


def test_tenants_are_named_where_there_are_some(cluster: AnsweringCluster) -> None:
    cluster.answers["chunks"] = [CHUNK, replace(CHUNK, tenant="acme")]
    head, *rows = run("chunk", "ls").splitlines()
    assert head.split()[4] == "tenant"
    assert ["acme" in row for row in rows] == [False, True]
    cluster.answers["chunk"] = [replace(CHUNK, tenant="acme")]
    assert "of tenant acme" in run("chunk", "show", "01")


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


def test_json_has_keys_as_digits(cluster: AnsweringCluster) -> None:
    (row,) = json.loads(run("chunk", "ls", "--json"))
    assert (row["key"], row["hits"], row["tier"]) == (CHUNK.key.hex(), 1234, "ram")
    (row,) = json.loads(run("chunk", "show", "01", "--json"))
    assert row["is_replicated"]
    found = json.loads(run("chunk", "lookup", "x", "--json"))
    assert found["chunks"][0]["key"] == (b"k" * 36).hex()
    assert (found["cached_tokens"], found["disk_tokens"]) == (32, 0)


# Prompts


def test_lookup_tells_tokens_in_ram_from_those_on_disk(cluster: AnsweringCluster) -> None:
    shown = run("chunk", "lookup", "x")
    assert "32 of 40 tokens can be loaded\n" in shown
    assert "0 to 31" in shown
    cluster.answers["lookup"] = replace(FOUND, disk_tokens=12)
    shown = run("chunk", "lookup", "x")
    assert "32 of 40 tokens can be loaded: 20 from RAM, 12 from disk" in shown


def test_prompt_of_which_nothing_is_cached_is_an_answer_with_code_1(
    cluster: AnsweringCluster,
) -> None:
    cluster.answers["lookup"] = replace(FOUND, cached_tokens=0, nodes=[])
    assert run("chunk", "lookup", "x", code=1).endswith("0 of 40 tokens can be loaded\n")


def test_lookup_leaves_out_windows_that_are_nowhere_and_not_needed(
    cluster: AnsweringCluster,
) -> None:
    rows = [
        replace(FOUND.chunks[0], key=name * 36, group=1, nodes=nodes, is_needed=is_needed)
        for name, nodes, is_needed in ((b"w", ["n"], False), (b"x", [], False), (b"y", [], True))
    ]
    cluster.answers["lookup"] = replace(FOUND, chunks=rows)
    shown = run("chunk", "lookup", "x")
    digits = [each.key.hex()[: chunks.SHOWN_DIGITS] for each in rows]
    assert [each in shown for each in digits] == [True, False, True]
    assert "1 chunks of windows and states are nowhere, and not needed" in shown


def test_lookup_reads_a_prompt_in_any_form(cluster: AnsweringCluster, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    messages = [{"role": "user", "content": "Hello"}]
    chat.write_text(json.dumps({"messages": messages}))
    traits = ["--trait", "cache_salt=s", "--trait", "lora=fr=/adapters/fr"]
    run("chunk", "lookup", "Hello", "--model", "tiny", *traits)
    run("chunk", "lookup", "-", stdin="from a pipe")
    run("chunk", "lookup", f"@{chat}", "--form", "chat")
    run("chunk", "lookup", "[1, 2]", "--form", "tokens")
    run("chunk", "lookup", "1,2", "--form", "tokens")
    forms = ("text", "messages", "tokens")
    asked = cluster.was_asked("lookup")
    assert [{name: each[name] for name in forms if name in each} for each in asked] == [
        {"text": "Hello"},
        {"text": "from a pipe"},
        {"messages": messages},
        {"tokens": [1, 2]},
        {"tokens": [1, 2]},
    ]
    assert asked[0]["traits"] == raykv.PromptTraits("s", "fr", "/adapters/fr")


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
    cluster: AnsweringCluster, arguments: list[str], expected: str
) -> None:
    with pytest.raises(SettingError, match=expected):
        run("chunk", "lookup", *arguments)
    assert cluster.asked == []


def test_commands_take_keys_and_prompts(cluster: AnsweringCluster, tmp_path: Path) -> None:
    prompt, keys = tmp_path / "prompt.txt", tmp_path / "keys"
    prompt.write_text("Hello")
    keys.write_text("cd34\nef56")
    cluster.answers["prefetch"] = TransferResult(asked=2, came=2)
    given: list[Any] = ["ab12", f"@{keys}", f"text:@{prompt}", "-"]
    run("prefetch", *given, "--to", "n", stdin="01 02")
    assert cluster.was_asked("lookup") == [{"text": "Hello", "namespace": None}]
    (_, (wanted, to), _) = cluster.asked[-1]
    assert [each.hex() for each in wanted] == [
        *("ab12", "cd34", "ef56", (b"k" * 36).hex(), "01", "02"),
    ]
    assert to == "n"
