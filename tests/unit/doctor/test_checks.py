"""The doctor: facts with a planted fault in, and the one finding that names it out."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from raykv.base.ids import Stamp
from raykv.cli.trouble import exit_code, print_findings
from raykv.doctor.checks import CHECKS, MANY_MISSED, MANY_STORED, diagnose
from raykv.doctor.facts import ActorFacts, ClusterFacts, NodeFacts
from raykv.memory.room import RESERVE_BYTES
from raykv.protocol.findings import (
    Endpoint,
    Finding,
    HostFacts,
    MemoryLimit,
    Severity,
    UnownedFolder,
)
from raykv.protocol.measures import BreakerReport
from raykv.protocol.node import DiskStats, NodeDescription
from raykv.protocol.status import ClusterStatus, EngineStatus, NodeStatus

GIB = 1 << 30
PROTOCOL = 7
ANSWERED = ActorFacts("ALIVE")
MISSING = None
SILENT = ActorFacts("ALIVE", "no answer within 5 s")

TRAITS = {"hash_algorithm": "sha256", "hash_seed": "abc", "dtype": "bfloat16"}


def description(node_id: str, **changes: Any) -> NodeDescription:
    plain = NodeDescription(
        version=PROTOCOL,
        raykv_version="1.0",
        node_id=node_id,
        life=1,
        socket_name="s",
        pool_bytes=8 * GIB,
        slab_bytes=GIB,
        prefaulted_bytes=8 * GIB,
        pid=1,
        num_workers=1,
    )
    return msgspec.structs.replace(plain, **changes)


def host(**changes: Any) -> HostFacts:
    plain = HostFacts(
        hostname="box",
        raykv_version="1.0",
        ray_version="2.60.0",
        python_version="3.11.7",
        wall_time=0.0,
        pool_bytes=8 * GIB,
        left_bytes=2 * GIB,
        limits=[MemoryLimit(32 * GIB, 64 * GIB, "the box")],
        shm_bytes=32 * GIB,
        plasma_folder="/dev/shm",
    )
    return msgspec.structs.replace(plain, **changes)


def node(node_id: str, **changes: Any) -> NodeFacts:
    plain = NodeFacts(node_id, "box", True, ANSWERED, description(node_id), host())
    return replace(plain, **changes)


def node_status(node_id: str, age_s: float = 0.5) -> NodeStatus:
    values: dict[str, Any] = dict.fromkeys(NodeStatus.__struct_fields__, 0)
    texts = {"node_id": node_id, "hostname": "box", "raykv_version": "1.0"}
    others = {
        "age_s": age_s,
        "disk": DiskStats(),
        "orders": Stamp(1, 4),
        "breakers": BreakerReport(),
    }
    return NodeStatus(**{**values, **texts, **others})


def engine(engine_id: str, node_id: str, **changes: Any) -> EngineStatus:
    plain = EngineStatus(engine_id, node_id, "ns", "tiny", 1, 1.0, "vLLM 0.32", {}, TRAITS)
    return msgspec.structs.replace(plain, **changes)


STATUS = ClusterStatus(
    address="head:1",
    life=1,
    raykv_version="1.0",
    paused=False,
    nodes=[node_status("one"), node_status("two")],
    engines=[engine("e1", "one"), engine("e2", "two")],
    orders=Stamp(1, 4),
)
HEALTHY = ClusterFacts("1.0", PROTOCOL, ANSWERED, STATUS, [node("one"), node("two")])


STORES_ONLY = {"chunks_stored": MANY_STORED, "chunks_loaded": 0}
WINDOWS = {**TRAITS, "chunks": "0:32 1:32/3 2:32/3"}
WITHOUT_WINDOWS = {
    "chunks_stored": 3 * MANY_STORED,
    "missed_tokens_window_missing": MANY_MISSED,
    "missed_tokens_never_stored": 100,
    "missed_tokens_incomplete_chunk": 10 * MANY_MISSED,
}


def with_status(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, status=msgspec.structs.replace(STATUS, **changes))


def with_second(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, nodes=[node("one"), node("two", **changes)])


def with_engines(**changes: Any) -> ClusterFacts:
    """The second engine differs."""
    return with_status(engines=[engine("e1", "one"), engine("e2", "two", **changes)])


def with_breaker(state: str, reason: str) -> ClusterFacts:
    """The first engine has left the second node alone."""
    report = BreakerReport(["node two"], [state], [1], [1.0], [reason])
    return with_status(engines=[engine("e1", "one", breakers=report), engine("e2", "two")])


def wrong(facts: ClusterFacts) -> list[Finding]:
    return [each for each in diagnose(facts) if each.severity is not Severity.OK]


def only(facts: ClusterFacts) -> Finding:
    """The one thing that is wrong."""
    found = wrong(facts)
    assert len(found) == 1, found
    assert found[0].mend
    return found[0]


def test_healthy_cluster_gets_one_line_per_check_and_no_complaint() -> None:
    findings = diagnose(HEALTHY)
    assert [each.check for each in findings] == list(CHECKS)
    assert {each.severity for each in findings} == {Severity.OK}
    assert exit_code(findings) == 0


PLANTED: list[tuple[str, ClusterFacts, str, Severity, list[str]]] = [
    (
        "engine whose Ray node is gone",
        replace(with_status(waiting={"e3": "three"}), hostnames={"three": "rack7"}),
        "placement",
        Severity.FAIL,
        ["engine e3", "its Ray node three (rack7) is gone"],
    ),
    (
        "engine whose NodeActor does not report",
        replace(with_status(waiting={"e3": "two"}), hostnames={"two": "box"}),
        "placement",
        Severity.FAIL,
        ["engine e3", "node two (box) does not report"],
    ),
    (
        "scheduler actor frozen",
        replace(HEALTHY, scheduler=SILENT),
        "scheduler",
        Severity.FAIL,
        ["does not answer", "no answer within 5 s"],
    ),
    (
        "scheduler actor not placed",
        replace(HEALTHY, scheduler=replace(SILENT, ray_state="PENDING_CREATION")),
        "scheduler",
        Severity.FAIL,
        ["not placed", "PENDING_CREATION"],
    ),
    (
        "scheduler actor gone",
        replace(HEALTHY, scheduler=MISSING),
        "scheduler",
        Severity.FAIL,
        ["no scheduler actor"],
    ),
    ("paused", with_status(paused=True), "scheduler", Severity.WARN, ["paused"]),
    (
        "node actor frozen",
        with_second(actor=SILENT),
        "placement",
        Severity.FAIL,
        ["node two", "does not answer"],
    ),
    (
        "node that does not hear of orders",
        with_status(
            nodes=[
                node_status("one"),
                msgspec.structs.replace(node_status("two"), orders=Stamp(1, 3)),
            ]
        ),
        "orders",
        Severity.WARN,
        ["node two follows orders number 3", "number 4 is in force"],
    ),
    (
        "disk that can't be written",
        with_status(
            nodes=[
                node_status("one"),
                msgspec.structs.replace(
                    node_status("two"), disk=DiskStats(path="/d", problem="it is full")
                ),
            ]
        ),
        "disks",
        Severity.WARN,
        ["node two", "/d: it is full"],
    ),
    (
        "folders of earlier nodes",
        replace(
            HEALTHY,
            nodes=[
                node(
                    name,
                    host=host(
                        unowned=[
                            UnownedFolder("/d/raykv-3", 3 * GIB, 7200.0 + age_s),
                            UnownedFolder("/d/raykv-5", GIB, 7200.0),
                            UnownedFolder("/d/raykv-6", GIB, 60.0),
                        ]
                    ),
                )
                for name, age_s in (("one", 0.0), ("two", 1.0))
            ],
        ),
        "disks",
        Severity.WARN,
        ["node one (box), node two (box) sees 4.0 GiB", "/d/raykv-3, /d/raykv-5"],
    ),
    (
        "engine without node actor",
        with_second(actor=MISSING, description=None, host=None),
        "placement",
        Severity.FAIL,
        ["engine e2", "node two", "no NodeActor"],
    ),
    (
        "node actor that does not report",
        with_status(nodes=[node_status("one"), node_status("two", age_s=4.0)]),
        "placement",
        Severity.FAIL,
        ["node two", "4 s ago"],
    ),
    (
        "node actor of a node that is gone",
        replace(HEALTHY, nodes=[*HEALTHY.nodes, node("old", is_alive=False, actor=SILENT)]),
        "placement",
        Severity.WARN,
        ["node old", "gone"],
    ),
    (
        "node actor of another protocol",
        with_second(description=description("two", version=6, raykv_version="0.9")),
        "versions",
        Severity.FAIL,
        ["node two", "0.9", "protocol 6", "protocol 7"],
    ),
    (
        "node actor of another version",
        with_second(description=description("two", raykv_version="1.1")),
        "versions",
        Severity.WARN,
        ["1.1: the NodeActor of node two", "1.0: "],
    ),
    (
        "another Ray",
        with_second(host=host(ray_version="2.61.0")),
        "versions",
        Severity.WARN,
        ["Ray versions differ", "2.61.0: node two"],
    ),
    (
        "another Python",
        with_second(host=host(python_version="3.12.1")),
        "versions",
        Severity.WARN,
        ["Python versions differ", "3.12.1: node two"],
    ),
    (
        "another vLLM",
        with_engines(versions="vLLM 0.33"),
        "versions",
        Severity.WARN,
        ["vLLM 0.33: engine e2"],
    ),
    (
        "another hash seed",
        with_engines(namespace="other", traits={**TRAITS, "hash_seed": "xyz"}),
        "hashes",
        Severity.FAIL,
        ["hash_seed differs", "abc: engine e1", "xyz: engine e2"],
    ),
    (
        "a random hash seed",
        with_engines(
            namespace="other",
            traits={**TRAITS, "hash_algorithm": "sha256", "hash_seed": "random"},
        ),
        "hashes",
        Severity.FAIL,
        ["engine e2", "random seed"],
    ),
    (
        "another hash algorithm",
        with_engines(namespace="other", traits={**TRAITS, "hash_algorithm": "xxhash"}),
        "hashes",
        Severity.FAIL,
        ["hash_algorithm differs", "sha256: engine e1", "xxhash: engine e2"],
    ),
    (
        "another data type",
        with_engines(namespace="other", traits={**TRAITS, "dtype": "float32"}),
        "hashes",
        Severity.WARN,
        ["dtype differs", "float32: engine e2"],
    ),
    (
        "other weights",
        with_engines(namespace="other", traits={**TRAITS, "weights_version": "2"}),
        "hashes",
        Severity.WARN,
        ["weights_version differs"],
    ),
    (
        "namespaces differ and nobody says why",
        with_status(
            engines=[
                engine("e1", "one", traits={}),
                engine("e2", "two", traits={}, namespace="other"),
            ]
        ),
        "hashes",
        Severity.WARN,
        ["tiny", "do not say why"],
    ),
    (
        "stores that nobody loads",
        with_status(engines=[engine("e1", "one"), engine("e2", "two", counters=STORES_ONLY)]),
        "use",
        Severity.WARN,
        ["engine e1", "have stored 1,024 chunks and loaded none"],
    ),
    (
        "stores that nobody can load for want of windows",
        with_engines(counters=WITHOUT_WINDOWS, traits=WINDOWS),
        "use",
        Severity.WARN,
        ["have stored 3,072 chunks and loaded none; 65,536 prompt tokens", "window_missing"],
    ),
    (
        "more prefixes without their windows than with them",
        with_engines(
            counters={**WITHOUT_WINDOWS, "chunks_loaded": 9, "loaded_tokens": 288}, traits=WINDOWS
        ),
        "use",
        Severity.WARN,
        ["loaded 288 prompt tokens, and 65,536 known ones were computed, because no window"],
    ),
    (
        "refused pool",
        with_second(description=description("two", refusal="the box is full")),
        "memory",
        Severity.FAIL,
        ["node two", "gives no pool: the box is full"],
    ),
    (
        "pool that outgrows its limit",
        with_second(host=host(limits=[MemoryLimit(GIB, 9 * GIB, "the box")])),
        "memory",
        Severity.FAIL,
        ["node two", "2.0 GiB of 8.0 GiB", "the box allows 9.0 GiB and has 1.0 GiB free"],
    ),
    (
        "pool that waits for memory",
        with_second(host=host(is_short=True)),
        "memory",
        Severity.FAIL,
        ["node two", "short of memory"],
    ),
    (
        "memory nearly out",
        with_second(host=host(left_bytes=0, limits=[MemoryLimit(1, 9 * GIB, "the box")])),
        "memory",
        Severity.WARN,
        ["node two", "hardly any memory left"],
    ),
    (
        "objects on a disk",
        with_second(host=host(plasma_folder="/tmp/ray", shm_bytes=2 * GIB)),
        "shm",
        Severity.WARN,
        ["node two", "/tmp/ray", "2.0 GiB"],
    ),
    (
        "small /dev/shm",
        with_second(host=host(shm_bytes=64 << 20)),
        "shm",
        Severity.WARN,
        ["node two", "64.0 MiB", "worker processes"],
    ),
    (
        "closed port",
        with_second(
            host=host(unreached=[(Endpoint("10.0.0.1", 77, "the raylet of node one"), "timed out")])
        ),
        "ports",
        Severity.FAIL,
        ["node two", "the raylet of node one", "10.0.0.1:77", "timed out"],
    ),
    (
        "clock a bit off",
        with_second(skew_s=-5.0, skew_error_s=0.5),
        "clocks",
        Severity.WARN,
        ["node two", "5.0 s behind"],
    ),
    (
        "clock far off",
        with_second(skew_s=3600.0),
        "clocks",
        Severity.FAIL,
        ["3600.0 s ahead"],
    ),
    (
        "open breaker",
        with_breaker("open", "time-out"),
        "breakers",
        Severity.FAIL,
        ["engine e1", "node two", "is open: time-out"],
    ),
    (
        "half-open breaker",
        with_breaker("half-open", ""),
        "breakers",
        Severity.WARN,
        ["half-open"],
    ),
    (
        "threads that fail",
        with_second(host=host(threads_failed=3)),
        "threads",
        Severity.WARN,
        ["node two", "3 times"],
    ),
]


@pytest.mark.parametrize(
    ("facts", "check", "severity", "words"),
    [case[1:] for case in PLANTED],
    ids=[case[0] for case in PLANTED],
)
def test_planted_fault_is_found_and_named(
    facts: ClusterFacts, check: str, severity: Severity, words: list[str]
) -> None:
    found = [each for each in wrong(facts) if "incomplete" not in each.what]
    assert [(each.check, each.severity) for each in found] == [(check, severity)], found
    assert [word for word in words if word not in found[0].what] == [], found[0].what
    assert found[0].mend
    assert exit_code(found) == (severity is Severity.FAIL)


def test_stores_of_several_groups_are_not_many_prompts() -> None:
    counters = {"chunks_stored": 3 * MANY_STORED - 1}
    assert wrong(with_engines(counters=counters, traits=WINDOWS)) == []


def test_every_check_has_a_planted_fault() -> None:
    assert {check for _, _, check, _, _ in PLANTED} == set(CHECKS)


def test_cluster_without_raykv_is_told_so_and_nothing_else() -> None:
    bare = NodeFacts("one", "box", True, MISSING)
    finding = only(ClusterFacts("1.0", PROTOCOL, MISSING, None, [bare]))
    assert finding.severity is Severity.WARN
    assert "RayKV does not run" in finding.what


def test_node_without_engines_needs_no_node_actor() -> None:
    bare = NodeFacts("three", "box", True, MISSING)
    assert wrong(replace(HEALTHY, nodes=[*HEALTHY.nodes, bare])) == []


def test_engine_on_a_node_that_does_not_report_is_found() -> None:
    facts = with_status(nodes=[node_status("one")])
    checks = {each.check for each in wrong(facts)}
    assert checks == {"placement"}
    assert any("e2" in each.what and "does not report" in each.what for each in wrong(facts))


def test_checks_that_need_a_silent_scheduler_actor_do_not_say_all_is_well() -> None:
    findings = diagnose(replace(HEALTHY, scheduler=SILENT, status=None))
    by_check = {each.check: each for each in findings}
    assert by_check["hashes"].severity is Severity.WARN
    assert "scheduler actor does not answer" in by_check["hashes"].what


def test_checks_that_need_a_silent_node_do_not_say_all_is_well() -> None:
    findings = diagnose(with_second(actor=SILENT, description=None, host=None))
    unknown = {each.check for each in findings if "incomplete" in each.what}
    assert unknown == {"memory", "shm", "ports", "clocks", "threads"}


def test_place_of_objects_does_not_matter_to_one_node() -> None:
    alone = node("one", host=host(plasma_folder="/tmp/ray"))
    status = msgspec.structs.replace(
        STATUS, nodes=[node_status("one")], engines=[engine("e1", "one")]
    )
    assert wrong(replace(HEALTHY, nodes=[alone], status=status)) == []


def test_skew_within_the_error_of_its_measurement_is_none() -> None:
    assert wrong(with_second(skew_s=5.0, skew_error_s=4.0)) == []


def test_pool_that_still_fits_exactly_is_well() -> None:
    limits = [MemoryLimit(2 * GIB, 64 * GIB, "the box")]
    assert wrong(with_second(host=host(limits=limits))) == []
    assert RESERVE_BYTES < GIB


def test_pool_file_on_a_disk_may_have_more_left_than_memory_is_free() -> None:
    limits = [MemoryLimit(GIB, 64 * GIB, "the box")]
    assert wrong(with_second(host=host(limits=limits, is_memory=False))) == []


def test_engines_that_begin_alike_are_told_apart() -> None:
    beginning = "llama-engine-"
    engines = [
        engine(f"{beginning}1", "one"),
        engine(f"{beginning}2", "two", namespace="other", traits={**TRAITS, "hash_seed": "xyz"}),
    ]
    finding = only(with_status(engines=engines))
    assert "abc: " in finding.what
    assert "xyz: " in finding.what


def test_engines_of_different_models_are_not_compared() -> None:
    assert wrong(with_engines(model="large", namespace="other", traits={"hash_seed": "z"})) == []


def test_single_engine_with_a_random_seed_is_told() -> None:
    traits = {**TRAITS, "hash_algorithm": "xxhash", "hash_seed": "random"}
    facts = with_status(engines=[engine("e1", "one", traits=traits)])
    assert "PYTHONHASHSEED" in only(facts).mend


def test_findings_are_printed_with_what_to_do() -> None:
    out = StringIO()
    print_findings(
        diagnose(replace(HEALTHY, scheduler=MISSING)),
        Console(file=out, width=60, color_system=None),
    )
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("FAIL  scheduler")
    assert lines[1].strip().startswith("→ running engines make a new one")
    assert sum(line.startswith("ok ") for line in lines) == len(CHECKS) - 1
