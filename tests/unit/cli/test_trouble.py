"""What `raykv explain` says, and how `raykv doctor` ends without a cluster."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from raykv import cli
from raykv.base.ids import MissReason
from raykv.cli.trouble import ADVICE, advice
from raykv.protocol.engine import MissRecord, Parting
from raykv.protocol.reader import Explanation
from tests.fixtures.commands import AnsweringCluster, run

RECORD = MissRecord(
    "cmpl-7-0-abcd", 1000, 96, 640, {"incomplete_chunk": 8, "evicted": 256}, b"\xab\xcd"
)
PARTING = Parting(5, b"\x12", before=[1, 2], own=[3], other=[4])
EXPLANATION = Explanation(RECORD, "engine-1", "node-1", "namespace-1", "tiny", age_s=12.3456)


def explained(cluster: AnsweringCluster, *records: MissRecord, hint: str = "") -> str:
    """What is said of requests, in words that are one space apart."""
    cluster.answers["why_miss"] = [replace(EXPLANATION, record=r, hint=hint) for r in records]
    return " ".join(run("explain", "cmpl-7").split())


def test_explanation_has_every_source_and_reason_and_one_advice(cluster: AnsweringCluster) -> None:
    text = explained(cluster, RECORD)
    assert cluster.asked == [("why_miss", ("cmpl-7",), {})]
    assert "request cmpl-7-0-abcd: ended 12 s ago, tiny, engine engine-1 on node node-1" in text
    assert (
        "in vLLM's own cache 96 10 % loaded by RayKV 640 64 % computed: evicted 256 26 % "
        f"computed: incomplete_chunk 8 1 % all 1,000 100 % {ADVICE[MissReason.EVICTED]}"
    ) in text


def test_explanation_comes_as_json(cluster: AnsweringCluster) -> None:
    why = {"raykv_sesion": "there is no such key: did you mean raykv_session?"}
    explained(cluster, replace(RECORD, parting=PARTING, ignored=why), hint="released")
    (row,) = json.loads(run("explain", "cmpl-7", "--json"))
    assert row == {
        "request_id": "cmpl-7-0-abcd",
        "prompt_tokens": 1000,
        "own_cache_tokens": 96,
        "loaded_tokens": 640,
        "missed_tokens": {"incomplete_chunk": 8, "evicted": 256},
        "first_missing_key": "abcd",
        "missing_at_places": [],
        "parting": {
            "at": 5,
            "tokens_behind": 995,
            "nearest_key": "12",
            "nearest_is_cached": False,
            "has_same_tokens": False,
            "before_tokens": [1, 2],
            "before_text": "1 2",
            "own_tokens": [3],
            "own_text": "3",
            "other_tokens": [4],
            "other_text": "4",
        },
        "advice": ADVICE[MissReason.EVICTED],
        "hint": "released",
        "ignored": why,
        "engine_id": "engine-1",
        "node_id": "node-1",
        "namespace": "namespace-1",
        "model": "tiny",
        "tenant": "",
        "age_s": 12.346,
    }


@pytest.mark.parametrize(
    ("parting", "expected"),
    [
        (
            Parting(5, b"\x12"),
            "nearest prompt that was there before it at token 5 of 1,000: the 995 ",
        ),
        (PARTING, "Behind '1 2' it has '3', the other one '4'."),
        (
            Parting(32, b"\x12", is_same=True),
            "the same first 32 tokens: cache_salt, the adapter or",
        ),
    ],
    ids=["place", "tokens", "salt"],
)
def test_parting_is_a_sentence(cluster: AnsweringCluster, parting: Parting, expected: str) -> None:
    assert expected in explained(cluster, replace(RECORD, parting=parting))


def test_what_hints_did_and_did_not_do_is_said(cluster: AnsweringCluster) -> None:
    hint = "released: its session 'agent [7]' was over"
    why = {"raykv_sesion": "there is no such key: did you mean raykv_session?"}
    text = explained(cluster, replace(RECORD, ignored=why), hint=hint)
    assert f"What was missing first had been {hint}." in text
    assert f"It asked for raykv_sesion, which had no effect: {why['raykv_sesion']}." in text


def test_place_that_lacked_what_the_others_had_is_named(cluster: AnsweringCluster) -> None:
    text = explained(cluster, replace(RECORD, places=[2]))
    assert "Of the engine's places, 2 had not got it; the others had." in text


def test_id_that_looks_like_markup_is_shown_as_it_is(cluster: AnsweringCluster) -> None:
    text = explained(cluster, replace(RECORD, request_id="[red]a[/]b[/]", tenant="[b]"))
    assert "request [red]a[/]b[/]: ended" in text
    assert "of tenant [b]" in text


def test_several_requests_come_in_the_order_of_the_answer(cluster: AnsweringCluster) -> None:
    text = explained(cluster, MissRecord("newer", 1, 0, 1), MissRecord("older", 1, 0, 1))
    assert 0 <= text.index("request newer") < text.index("request older")


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(MissReason)
    assert len(set(ADVICE.values())) == len(ADVICE)
    assert all(sentence.endswith(".") for sentence in ADVICE.values())


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ({}, "All of the prompt was cached."),
        ({"incomplete_chunk": 8}, ADVICE[MissReason.INCOMPLETE_CHUNK]),
        ({"incomplete_chunk": 800, "paused": 1}, ADVICE[MissReason.PAUSED]),
        ({"pool_full": 3, "evicted": 2}, ADVICE[MissReason.POOL_FULL]),
        (
            {"of_tomorrow": 3},
            "A newer version of RayKV gave this reason: install that version here.",
        ),
    ],
)
def test_advice_is_about_the_largest_reason_but_the_prompts_end(
    missed: dict[str, int], expected: str
) -> None:
    assert advice(MissRecord("r", 1000, 0, 0, missed)) == expected


def test_doctor_ends_with_2_when_no_cluster_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Port 1 of this host: nobody listens there.
    monkeypatch.setattr("sys.argv", ["raykv", "doctor", "--address", "127.0.0.1:1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no Ray cluster can be reached at '127.0.0.1:1'" in capsys.readouterr().err
