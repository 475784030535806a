"""What listens where in a Ray cluster with RayKV: the table of deploy/security.md.

tests/integration/test_listeners.py looks at the sockets of running processes, and
tests/e2e/test_strangers.py asks them from a host that is no member: what is not in the table fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class At(StrEnum):
    """Who can connect, as far as the network goes."""

    ALL = "all interfaces"
    NODE = "the node's address"
    LOOPBACK = "loopback"
    FILE = "a Unix socket in a folder"
    ABSTRACT = "an abstract Unix socket"


class Answer(StrEnum):
    """What a host that is no member gets of it, where it can connect."""

    TOKEN = "gRPC that wants Ray's token"
    UNAUTHORIZED = "HTTP 401 without Ray's token"
    METRICS = "metrics in plain text"
    API = "vLLM's API"
    EVENTS = "events"
    GLOO = "torch's protocol, which asks for nothing"
    NONE = "nothing: it can't connect"


@dataclass(frozen=True)
class Listener:
    """A row. `who` are roles; see `tests/fixtures/listeners.py`."""

    who: tuple[str, ...]
    what: str
    at: At
    port: str
    answer: Answer
    where: str = "every node"


ENGINES = ("vLLM's EngineCore", "vLLM's worker")
HEAD = "the head"
MEMBERS = (
    *("NodeActor", "SchedulerActor", "PublisherActor", "vLLM's EngineCore"),
    *("a Serve replica", "Serve's proxy", "a Ray worker", "a client of Ray"),
)
"""Whoever calls actors or is one."""

LISTENERS = (
    Listener(("NodeActor", "SchedulerActor"), "metrics", At.NODE, "`metrics_port`", Answer.METRICS),
    Listener(("NodeActor",), "engines of the node", At.ABSTRACT, "", Answer.NONE),
    Listener(
        ("PublisherActor",),
        "events and their replay, if they are published",
        At.NODE,
        "`events_endpoint`, `raykv publish start`",
        Answer.EVENTS,
        HEAD,
    ),
    Listener(("vLLM's API server",), "requests, metrics", At.ALL, "`--port`", Answer.API),
    Listener(
        ("vLLM's API server", *ENGINES, "a Serve replica"), "vLLM's own", At.FILE, "", Answer.NONE
    ),
    Listener(("vLLM's worker",), "torch.distributed", At.NODE, "any", Answer.GLOO),
    Listener(
        MEMBERS,
        "calls of actors",
        At.ALL,
        "any; workers: 10002 to 19999",
        Answer.TOKEN,
    ),
    Listener(
        ("gcs_server",), "Ray's state", At.ALL, "`ray start --port`, 6379", Answer.TOKEN, HEAD
    ),
    Listener(("raylet",), "leases, objects", At.ALL, "any", Answer.TOKEN),
    Listener(("raylet", "Ray's dashboard"), "Ray on the node", At.FILE, "", Answer.NONE),
    Listener(("Ray's dashboard agent",), "gRPC", At.ALL, "any", Answer.TOKEN),
    Listener(("Ray's dashboard agent",), "health, jobs", At.NODE, "52365", Answer.UNAUTHORIZED),
    Listener(("Ray's dashboard agent",), "health, jobs", At.LOOPBACK, "52365", Answer.NONE),
    Listener(
        ("Ray's dashboard agent",), "metrics", At.ALL, "`--metrics-export-port`", Answer.METRICS
    ),
    Listener(("Ray's runtime environments",), "HTTP", At.NODE, "any", Answer.UNAUTHORIZED),
    Listener(("Ray's dashboard",), "jobs, state", At.LOOPBACK, "8265", Answer.NONE, HEAD),
    Listener(("Ray's dashboard", "Ray's monitor"), "metrics", At.ALL, "any", Answer.METRICS, HEAD),
    Listener(("Ray's client server",), "Ray clients", At.NODE, "10001", Answer.TOKEN, HEAD),
    Listener(("Ray's client server",), "Ray clients", At.LOOPBACK, "10001", Answer.NONE, HEAD),
    Listener(("Serve's proxy",), "requests", At.LOOPBACK, "`http_options`", Answer.NONE),
    Listener(("a Serve replica",), "other replicas", At.ALL, "any", Answer.TOKEN),
)


def table() -> str:
    """The rows, in Markdown."""
    lines = ["| who listens | for | where | port | on | a stranger gets |", f"|{'---|' * 6}"]
    for row in LISTENERS:
        who = "actors, engines, clients of Ray" if row.who == MEMBERS else ", ".join(row.who)
        cells = (who, row.what, row.at, row.port or "none", row.where, row.answer)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PAGE = Path(__file__).with_name("security.md")


def with_table(page: str) -> str:
    """The page with the rows of now; nothing else in it is a table."""
    lines = page.splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("|")]
    lines[places[0] : places[-1] + 1] = table().splitlines()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
