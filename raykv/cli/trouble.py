"""Commands for when something is wrong: doctor, explain, logs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import raykv
from raykv.base.errors import SettingError
from raykv.base.ids import MissReason
from raykv.cli.base import Address, AsJson, answer, console, print_json, say, table_of
from raykv.prompts.tokens import text_of_tokens
from raykv.protocol.engine import MissRecord, Parting
from raykv.protocol.findings import Finding, Severity
from raykv.protocol.reader import Explanation

_MARKS = {
    Severity.OK: ("ok  ", "green"),
    Severity.WARN: ("warn", "yellow"),
    Severity.FAIL: ("FAIL", "bold red"),
}

ADVICE = {
    MissReason.INCOMPLETE_CHUNK: "Nothing is wrong: tokens after the last whole chunk are "
    "always computed. A smaller blocks_per_chunk leaves fewer.",
    MissReason.OPTED_OUT: "The request asked for this: raykv_load or max_load_tokens in its "
    "kv_transfer_params, or prompt_logprobs, which only computing gives.",
    MissReason.ADAPTER_UNKNOWN: "The files of its LoRA adapter can't be read, or have changed "
    "since the engine loaded them: give a local folder, and load it in place after a change.",
    MissReason.MEDIA_UNKNOWN: "The client named its images or sound itself (uuid), so their "
    "content is unknown: leave the names out. Otherwise the engine's log says why.",
    MissReason.WEIGHTS_CHANGED: "The engine's weights were changed while it ran (reload_weights, "
    "update_weights, sleep of level 2), and this prefix was not computed with the new ones. If "
    "`raykv status` says that they have no name, nothing is loaded or stored.",
    MissReason.PAUSED: "The cache is switched off: `raykv resume` switches it on.",
    MissReason.NOT_ATTACHED: "The engine had not reached its NodeActor: its log says why, and "
    "`raykv status` shows whether it has since.",
    MissReason.NEVER_STORED: "No engine had stored this prefix, or it went long ago. If you expect "
    "it to be cached, compare the prompts from their first token on, and cache_salt.",
    MissReason.STORES_OFF: "The request that computed it did not store it: raykv_store in its "
    "kv_transfer_params, a pause, or stop_unused_stores=true while hardly anything is reused.",
    MissReason.STORE_FAILED: "Its store failed: look for NodeActor failures in the engine's log, "
    "and at how busy the node is.",
    MissReason.POOL_FULL: "The whole pool was pinned, in use or just found: set a larger "
    "pool_bytes, or run fewer engines on the node.",
    MissReason.EVICTED: "The pool is too small for the prompts that come again: set a larger "
    "pool_bytes.",
    MissReason.QUOTA: "Its tenant had more than its share: `raykv quota set` gives it more, `raykv "
    "quota ls` lists all shares.",
    MissReason.CLEARED: "The cache was cleared; it fills again by itself.",
    MissReason.CLEARING: "The engine cleared its cache, for which it needs the scheduler actor. If "
    "this lasts, `raykv status` shows whether that is away.",
    MissReason.OTHER_NAMESPACE: "Engines of another namespace have it: give all engines the same "
    "model, dtype, block_size, blocks_per_chunk and parallel sizes; `raykv status` lists them.",
    MissReason.PENDING_TOO_LONG: "It was still being stored: raise request_deadline_s if "
    "waiting is better than computing.",
    MissReason.UNANSWERED: "The scheduler actor was too slow: look at the load of its host, or "
    "raise request_deadline_s.",
    MissReason.FETCH_SLOWER: "Nothing is wrong: computing is faster than this network. "
    "always_fetch=true fetches all the same.",
    MissReason.WINDOW_MISSING: "The prefix is known, but not the sliding windows or states at its "
    "end: they are stored now, for the next prompt; a larger window_share stores more of them.",
    MissReason.FETCH_FAILED: "The transfer from another node failed or was too slow: look at that "
    "node's load and at request_deadline_s.",
    MissReason.NODE_LOST: "A NodeActor ended: its log says why. With pool_path a pool survives it.",
    MissReason.LOAD_FAILED: "The copy into the engine failed: its log says why; if it was late, "
    "raise step_deadline_s.",
    MissReason.BREAKER_OPEN: "An actor had failed too often, so it was not asked: `raykv status` "
    "and the engine's log name it.",
    MissReason.ABORTED: "The request ended before its tokens were needed.",
    MissReason.OTHER: "None of the usual reasons: an error in the engine's log says more.",
}
"""What to do about each reason, in one sentence."""


def doctor(*, as_json: AsJson = False, address: Address = None) -> None:
    """Check the cluster: what is wrong, and how to mend it.

    Exit code 0 when all is well (warnings are allowed), 1 when something is wrong, 2 when no
    cluster can be reached.

    Example: raykv doctor && echo all well
    """
    with raykv.connect(address) as cluster:
        findings = cluster.doctor()
    answer(findings, print_findings, as_json=as_json)
    raise typer.Exit(exit_code(findings))


def explain(
    request_id: Annotated[
        str, typer.Argument(help="The id in the answer or in X-Request-Id, or its beginning.")
    ],
    *,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Say where the prompt tokens of a request came from, and why some were not loaded.

    Example: raykv explain chatcmpl-9f2c
    """
    with raykv.connect(address) as cluster:
        found = cluster.why_miss(request_id)
    if as_json:
        print_json([_row(each) for each in found])
        return
    for each in found:
        _print_explanation(each)


def logs(
    whose: Annotated[
        str,
        typer.Argument(
            metavar="NODE|scheduler",
            help="The NodeActor of a node, by the beginning of Ray's id, or the scheduler actor.",
        ),
    ] = "scheduler",
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")
    ] = False,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Print the end of an actor's log: what it has written in this life.

    Example: raykv logs 3f9a --follow
    """
    if follow and as_json:
        raise SettingError("--follow writes text, without end: leave --json out")
    with raykv.connect(address) as cluster, contextlib.suppress(KeyboardInterrupt):
        node_id = "" if whose == "scheduler" else whose
        for piece in cluster.log(node_id, follow=follow):
            if as_json:
                print_json({"of": whose, "lines": piece.decode(errors="replace").splitlines()})
            else:
                typer.echo(piece, nl=False)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print one line for each, and below it what to do if something is wrong."""
    out = Console()
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        line = Text.assemble((mark, style), f"  {finding.check:<10}  {finding.what}")
        out.print(line, soft_wrap=True)
        if finding.mend:
            out.print(Text(f"                  → {finding.mend}", style="dim"), soft_wrap=True)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something is wrong; warnings are allowed."""
    return int(any(finding.severity is Severity.FAIL for finding in findings))


def _row(each: Explanation) -> dict[str, object]:
    record = each.record
    return {
        "request_id": record.request_id,
        "prompt_tokens": record.prompt,
        "own_cache_tokens": record.own,
        "loaded_tokens": record.loaded,
        "missed_tokens": record.missed,
        "first_missing_key": record.missing,
        "missing_at_places": record.places,
        "parting": _parting_row(each),
        "advice": advice(record),
        "hint": each.hint,
        "ignored": record.ignored,
        "engine_id": each.engine_id,
        "node_id": each.node_id,
        "namespace": each.namespace,
        "model": each.model,
        "tenant": record.tenant,
        "age_s": round(each.age_s, 3),
    }


def advice(record: MissRecord) -> str:
    """What to do about the reason with the most tokens, prompt ends aside."""
    missed = {name: count for name, count in record.missed.items() if count}
    if not missed:
        return "All of the prompt was cached."
    usual = str(MissReason.INCOMPLETE_CHUNK)
    largest = max(missed, key=lambda name: (name != usual, missed[name]))
    try:
        return ADVICE[MissReason(largest)]
    except ValueError:
        return "A newer version of RayKV gave this reason: install that version here."


def _print_explanation(each: Explanation) -> None:
    """A table, and sentences."""
    record = each.record
    say(
        f"request {record.request_id}: ended {each.age_s:.0f} s ago, {each.model}, "
        f"engine {each.engine_id[:12]} on node {each.node_id[:12]}"
        + (f", of tenant {record.tenant}" if record.tenant else "")
    )
    console().print(_sources(record))
    if each.hint:
        say(f"What was missing first had been {each.hint}.")
    if record.places:
        numbers = ", ".join(map(str, record.places))
        say(f"Of the engine's places, {numbers} had not got it; the others had.")
    say(advice(record))
    for name, why in record.ignored.items():
        say(f"It asked for {name}, which had no effect: {why}.")
    if record.parting is not None:
        say(parting_sentence(each, record.parting))


def parting_sentence(each: Explanation, parting: Parting) -> str:
    """Where a prompt leaves the nearest one that the engine had seen."""
    record = each.record
    is_cached = "is cached" if each.nearest_is_cached else "was there before it"
    if parting.is_same:
        return (
            f"The nearest prompt that {is_cached} has the same first {parting.at:,} tokens: "
            "cache_salt, the adapter or media differ."
        )
    shown = ""
    if parting.own:
        before, own, other = (
            _text_of(each.model, tokens) for tokens in (parting.before, parting.own, parting.other)
        )
        shown = f" Behind {before!r} it has {own!r}, the other one {other!r}."
    return (
        f"It leaves the nearest prompt that {is_cached} at token {parting.at:,} of "
        f"{record.prompt:,}: the {record.prompt - parting.at:,} tokens from there on can't be "
        f"shared.{shown} What changes from prompt to prompt belongs behind what stays."
    )


def _parting_row(each: Explanation) -> dict[str, object] | None:
    parting = each.record.parting
    if parting is None:
        return None
    row: dict[str, object] = {
        "at": parting.at,
        "tokens_behind": each.record.prompt - parting.at,
        "nearest_key": parting.nearest.hex(),
        "nearest_is_cached": each.nearest_is_cached,
        "has_same_tokens": parting.is_same,
    }
    parts = {"before": parting.before, "own": parting.own, "other": parting.other}
    for name, tokens in parts.items() if parting.own else ():
        row[f"{name}_tokens"] = tokens
        row[f"{name}_text"] = _text_of(each.model, tokens)
    return row


def _text_of(model: str, tokens: Sequence[int]) -> str:
    """Their text, where the model's tokenizer is here; else their numbers."""
    try:
        return text_of_tokens(model, tokens)
    except SettingError:
        return " ".join(map(str, tokens))


def _sources(record: MissRecord) -> Table:
    """Where the prompt tokens came from."""
    missed = sorted(record.missed.items(), key=lambda row: -row[1])
    rows = {
        "in vLLM's own cache": record.own,
        "loaded by RayKV": record.loaded,
        **{f"computed: {name}": count for name, count in missed},
        "all": record.prompt,
    }
    return table_of(
        rows.items(),
        {
            "prompt tokens": lambda row: row[0],
            "tokens": lambda row: f"{row[1]:,}",
            "share": lambda row: f"{100 * row[1] / max(1, record.prompt):.0f} %",
        },
    )
