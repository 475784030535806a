"""The doctor: facts with a planted fault in, and the one finding that names it out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from raykv.base.ids import Stamp
from raykv.cli.trouble import exit_code, print_findings
from raykv.doctor.checks import CHECKS, MANY_MISSED, MANY_STORED, diagnose
from raykv.doctor.facts import ActorFacts, ClusterFacts, NodeFacts
from raykv.protocol.findings import (
    Endpoint,
    Finding,
    HostFacts,
    MemoryLimit,
    Severity,
    UnownedFolder,
)
from raykv.protocol.measures import BreakerReport, OpenBreaker
from raykv.protocol.node import DiskStats, NodeDescription
from raykv.protocol.status import ClusterStatus, EngineStatus, NodeStatus
from tests.fixtures import statuses

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


def node_status(node_id: str) -> NodeStatus:
    plain = statuses.node(0, node_id=node_id)
    return msgspec.structs.replace(
        plain, hostname="box", raykv_version="1.0", age_s=0.5, orders=Stamp(1, 4)
    )


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


WINDOWS = {**TRAITS, "chunks": "0:32 1:32/3 2:32/3"}
WITHOUT_WINDOWS = {
    "chunks_stored": 3 * MANY_STORED,
    "missed_tokens_window_missing": MANY_MISSED,
    "missed_tokens_never_stored": 100,
    "missed_tokens_incomplete_chunk": 10 * MANY_MISSED,
}


def with_status(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, status=msgspec.structs.replace(STATUS, **changes))


def with_second_status(**changes: Any) -> ClusterFacts:
    """The second node reports something else."""
    second = msgspec.structs.replace(node_status("two"), **changes)
    return with_status(nodes=[node_status("one"), second])


def with_folders(young: tuple[str, int], old: list[tuple[str, int]]) -> ClusterFacts:
    """Both nodes see folders that no node holds, not quite at the same time."""
    nodes = []
    for name, age_s in (("one", 0.0), ("two", 1.0)):
        unowned = [UnownedFolder(*each, 7200.0 + age_s) for each in old]
        nodes.append(node(name, host=host(unowned=[*unowned, UnownedFolder(*young, 60.0)])))
    return replace(HEALTHY, nodes=nodes)


def with_second(**changes: Any) -> ClusterFacts:
    return replace(HEALTHY, nodes=[node("one"), node("two", **changes)])


def with_engines(**changes: Any) -> ClusterFacts:
    """The second engine differs."""
    return with_status(engines=[engine("e1", "one"), engine("e2", "two", **changes)])


def apart(**traits: str) -> ClusterFacts:
    """The second engine shares nothing, since these traits differ."""
    return with_engines(namespace="other", traits={**TRAITS, **traits})


def with_breaker(state: str, reason: str) -> ClusterFacts:
    """The first engine has left the second node alone."""
    report = BreakerReport([OpenBreaker("node two", state, 1, 1.0, reason)])
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


PLANTED: list[tuple[str, ClusterFacts]] = [
    (
        r"FAIL placement: engine e3 .*its Ray node three \(rack7\) is gone",
        replace(with_status(waiting={"e3": "three"}), hostnames={"three": "rack7"}),
    ),
    (
        r"FAIL placement: engine e3 .*node two \(box\) does not report",
        replace(with_status(waiting={"e3": "two"}), hostnames={"two": "box"}),
    ),
    ("FAIL placement: .*node two .*does not answer", with_second(actor=SILENT)),
    (
        "FAIL placement: engine e2 .*node two.* no NodeActor",
        with_second(actor=MISSING, description=None, host=None),
    ),
    ("FAIL placement: .*node two .*4 s ago", with_second_status(age_s=4.0)),
    (
        "WARN placement: .*node old.* gone",
        replace(HEALTHY, nodes=[*HEALTHY.nodes, node("old", is_alive=False, actor=SILENT)]),
    ),
    (
        "FAIL scheduler: .*does not answer.*no answer within 5 s",
        replace(HEALTHY, scheduler=SILENT),
    ),
    (
        "FAIL scheduler: .*not placed.*PENDING_CREATION",
        replace(HEALTHY, scheduler=replace(SILENT, ray_state="PENDING_CREATION")),
    ),
    ("FAIL scheduler: .*no scheduler actor", replace(HEALTHY, scheduler=MISSING)),
    ("WARN scheduler: .*paused", with_status(paused=True)),
    (
        "WARN orders: node two follows orders number 3 .*number 4 is in force",
        with_second_status(orders=Stamp(1, 3)),
    ),
    (
        "WARN disks: node two .*/d: it is full",
        with_second_status(disk=DiskStats(path="/d", problem="it is full")),
    ),
    (
        r"WARN disks: node one \(box\), node two \(box\) sees 4.0 GiB .*/d/raykv-3, /d/raykv-5$",
        with_folders(young=("/d/raykv-6", GIB), old=[("/d/raykv-3", 3 * GIB), ("/d/raykv-5", GIB)]),
    ),
    (
        "FAIL versions: .*node two .*0.9 .*protocol 6.*protocol 7",
        with_second(description=description("two", version=6, raykv_version="0.9")),
    ),
    (
        "WARN versions: .*1.0: .*1.1: the NodeActor of node two",
        with_second(description=description("two", raykv_version="1.1")),
    ),
    (
        "WARN versions: Ray versions differ.*2.61.0: node two",
        with_second(host=host(ray_version="2.61.0")),
    ),
    (
        "WARN versions: Python versions differ.*3.12.1: node two",
        with_second(host=host(python_version="3.12.1")),
    ),
    ("WARN versions: .*vLLM 0.33: engine e2", with_engines(versions="vLLM 0.33")),
    ("FAIL hashes: .*hash_seed differs.*abc: engine e1.*xyz: engine e2", apart(hash_seed="xyz")),
    ("FAIL hashes: engine e2 .*random seed", apart(hash_seed="random")),
    (
        "FAIL hashes: engine e1 .*random seed",
        with_status(engines=[engine("e1", "one", traits={**TRAITS, "hash_seed": "random"})]),
    ),
    (
        "FAIL hashes: .*hash_algorithm differs.*sha256: engine e1.*xxhash: engine e2",
        apart(hash_algorithm="xxhash"),
    ),
    ("WARN hashes: .*dtype differs.*float32: engine e2", apart(dtype="float32")),
    ("WARN hashes: .*weights_version differs", apart(weights_version="2")),
    (
        "WARN hashes: .*model tiny .*do not say why",
        with_status(
            engines=[
                engine("e1", "one", traits={}),
                engine("e2", "two", traits={}, namespace="other"),
            ]
        ),
    ),
    (
        "WARN use: engine e1.* have stored 1,024 chunks and loaded none",
        with_engines(counters={"chunks_stored": MANY_STORED, "chunks_loaded": 0}),
    ),
    (
        "WARN use: .*stored 3,072 chunks and loaded none; 65,536 prompt tokens .*window_missing",
        with_engines(counters=WITHOUT_WINDOWS, traits=WINDOWS),
    ),
    (
        "WARN use: .*loaded 288 prompt tokens, and 65,536 known ones were computed",
        with_engines(
            counters={**WITHOUT_WINDOWS, "chunks_loaded": 9, "loaded_tokens": 288}, traits=WINDOWS
        ),
    ),
    (
        "FAIL memory: node two .*gives no pool: the box is full",
        with_second(description=description("two", refusal="the box is full")),
    ),
    (
        "FAIL memory: node two .*2.0 GiB of 8.0 GiB .*allows 9.0 GiB and has 1.0 GiB free",
        with_second(host=host(limits=[MemoryLimit(GIB, 9 * GIB, "the box")])),
    ),
    ("FAIL memory: node two .*short of memory", with_second(host=host(is_short=True))),
    (
        "WARN memory: node two .*hardly any memory left",
        with_second(host=host(left_bytes=0, limits=[MemoryLimit(1, 9 * GIB, "the box")])),
    ),
    (
        "WARN shm: .*node two .*/tmp/ray.* 2.0 GiB",
        with_second(host=host(plasma_folder="/tmp/ray", shm_bytes=2 * GIB)),
    ),
    (
        "WARN shm: .*node two .*64.0 MiB.* worker processes",
        with_second(host=host(shm_bytes=64 << 20)),
    ),
    (
        "FAIL ports: node two .*the raylet of node one at 10.0.0.1:77: timed out",
        with_second(
            host=host(unreached=[(Endpoint("10.0.0.1", 77, "the raylet of node one"), "timed out")])
        ),
    ),
    ("WARN clocks: .*node two .*5.0 s behind", with_second(skew_s=-5.0, skew_error_s=0.5)),
    ("FAIL clocks: .*3600.0 s ahead", with_second(skew_s=3600.0)),
    (
        "FAIL breakers: engine e1 .*node two, .* is open for 1 s, 1 failures in a row: time-out",
        with_breaker("open", "time-out"),
    ),
    ("WARN breakers: .*half-open", with_breaker("half-open", "")),
    ("WARN threads: .*node two .*3 times", with_second(host=host(threads_failed=3))),
]


@pytest.mark.parametrize(("expected", "facts"), PLANTED)
def test_planted_fault_is_found_and_named(expected: str, facts: ClusterFacts) -> None:
    found = [each for each in wrong(facts) if "incomplete" not in each.what]
    (told,) = [f"{each.severity.name} {each.check}: {each.what}" for each in found]
    assert re.match(expected, told), told
    assert found[0].mend
    if "random seed" in expected:
        assert "PYTHONHASHSEED" in found[0].mend
    assert exit_code(found) == expected.startswith("FAIL")


def test_every_check_has_a_planted_fault() -> None:
    assert {expected.split(":")[0].split()[1] for expected, _ in PLANTED} == set(CHECKS)


BARE = NodeFacts("three", "box", True, MISSING)
ALONE = replace(
    with_status(nodes=[node_status("one")], engines=[engine("e1", "one")]),
    nodes=[node("one", host=host(plasma_folder="/tmp/ray"))],
)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(
            with_engines(counters={"chunks_stored": 3 * MANY_STORED - 1}, traits=WINDOWS),
            id="stores of several groups are not many prompts",
        ),
        pytest.param(
            replace(HEALTHY, nodes=[*HEALTHY.nodes, BARE]),
            id="node without engines needs no NodeActor",
        ),
        pytest.param(ALONE, id="where objects lie does not matter to one node"),
        pytest.param(
            with_second(skew_s=5.0, skew_error_s=4.0), id="skew within the error of measuring it"
        ),
        pytest.param(
            with_second(host=host(limits=[MemoryLimit(2 * GIB, 64 * GIB, "the box")])),
            id="pool that still fits exactly",
        ),
        pytest.param(
            with_second(host=host(limits=[MemoryLimit(GIB, 64 * GIB, "the box")], is_memory=False)),
            id="pool file on a disk may have more left than memory is free",
        ),
        pytest.param(
            with_engines(model="large", namespace="other", traits={"hash_seed": "z"}),
            id="engines of different models are not compared",
        ),
    ],
)
def test_no_fault_is_found_where_none_is(facts: ClusterFacts) -> None:
    assert wrong(facts) == []


def test_cluster_without_raykv_is_told_so_and_nothing_else() -> None:
    bare = NodeFacts("one", "box", True, MISSING)
    finding = only(ClusterFacts("1.0", PROTOCOL, MISSING, None, [bare]))
    assert finding.severity is Severity.WARN
    assert "RayKV does not run" in finding.what


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


def test_engines_that_begin_alike_are_told_apart() -> None:
    beginning = "llama-engine-"
    engines = [
        engine(f"{beginning}1", "one"),
        engine(f"{beginning}2", "two", namespace="other", traits={**TRAITS, "hash_seed": "xyz"}),
    ]
    finding = only(with_status(engines=engines))
    assert "abc: " in finding.what
    assert "xyz: " in finding.what


def test_findings_are_printed_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(diagnose(replace(HEALTHY, scheduler=MISSING)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  scheduler")
    assert lines[1].strip().startswith("→ running engines make a new one")
    assert sum(line.startswith("ok ") for line in lines) == len(CHECKS) - 1
