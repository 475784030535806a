"""Every wait in the product has a deadline, and every such number has a name and a reason.

Read off the sources: calls that are known to wait must say how long, or stand in the list of those
that are bounded otherwise, with the reason. Benchmarks, chaos runs and the demonstration with its
models are left out: a person watches them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import raykv.base.settings
from tests import house
from tests.house import ROOT, is_shell, module_name

LEFT_OUT = ("raykv/lab/", "raykv/serve/models.py")
SOURCES = [path for path in house.SOURCES if not str(path.relative_to(ROOT)).startswith(LEFT_OUT)]
DEADLINES = "raykv.base.deadlines"

TIMED = {
    "wait": 0,
    "join": 0,
    "result": 0,
    "exception": 0,
    "acquire": 1,
    "communicate": 1,
    "wait_procs": 1,
    "wait_for": 1,
    "create_connection": 1,
    "select": 3,
    "wait_readable": 1,
    "within": 0,
}
"""Calls that wait, and the position of their time-out; it may also be a keyword. Where `get` and
`put` are those of a queue is not to be seen, so see `is_queue`."""

TIMED_BY_KEYWORD = {"ray.get", "ray.wait", "subprocess.run", "subprocess.check_output"}
"""Calls that must have `timeout=`."""

UNTIMED = {"accept", "recv", "recvmsg", "recv_fds", "recv_into", "sendall", "sendmsg", "send_fds"}
"""Calls without a time-out of their own: each must be in `BOUNDED`."""

UNTIMED_NAMES = {
    "fcntl.flock",
    "ray.get_actor",
    "ray.init",
    "ray.kill",
    "ray.nodes",
    "ray.shutdown",
    "ray.util.list_named_actors",
}

BOUNDED = {
    ("raykv.node.attached", "send", "sendall"): "SO_SNDTIMEO, set when the worker has attached",
    ("raykv.node.service", "_accept", "accept"): "waits for strangers; `stop` wakes it",
    ("raykv.node.service", "_refuse", "sendall"): "what is left of NODE_HELLO_S, or less",
    ("raykv.node.lines", "serve", "recv"): "silence is fine; `DeathWatch` and `close` end it",
    ("raykv.node.lines", "send", "sendall"): "SO_SNDTIMEO, set when the line has begun",
    ("raykv.node.states.file", "promise", "flock"): "LOCK_NB: it does not wait",
    ("raykv.node.states.file", "is_expired", "flock"): "LOCK_NB: it does not wait",
    (
        "raykv.node.states.file",
        "wait",
        "flock",
    ): "a thread for it, which is waited for with a deadline",
    ("raykv.protocol.wire", "receive_with_fds", "recvmsg"): "the socket's own time-out",
    ("raykv.protocol.wire", "send_with_fds", "sendall"): "the socket's own time-out",
    ("raykv.protocol.wire", "send_with_fds", "send_fds"): "the socket's own time-out",
    ("raykv.worker.link", "_send", "sendall"): "SO_SNDTIMEO, set when the line is up",
    ("raykv.worker.link", "_await_attached", "recv"): "it is readable",
    ("raykv.worker.link", "_receive", "recv"): "MSG_DONTWAIT",
    ("raykv.worker.handover", "wait", "wait"): "of a link: its flush deadline",
    ("raykv.worker.staging", "wait", "wait"): "of a link: its flush deadline",
    ("raykv.vllm.transfers", "wait", "wait"): "of a link: its flush deadline",
    ("raykv.base.parent", "_end_after", "select"): "a daemon thread: until the parent has ended",
    (
        "raykv.serve.http.exchange",
        "_receive",
        "wait",
    ): "until the client leaves; `drive` cancels it",
    ("raykv.serve.command", "run_server", "wait"): "the process has ended, it is only reaped",
    ("raykv.cluster.join", "join", "init"): "Ray gives up by itself; the cluster was reachable",
    ("raykv.cluster.join", "_start_lock", "flock"): "LOCK_NB, in a loop with a deadline",
    ("raykv.cluster.join", "resolve_node_id", "nodes"): "at the start; Ray's own RPC deadline",
    ("raykv.node.disk.folder", "_try_lock", "flock"): "LOCK_NB",
    ("raykv.node.disk.folder", "_is_held", "flock"): "LOCK_NB",
    ("raykv.client.import_source", "import_source", "kill"): "for a person; Ray's own RPC deadline",
    ("raykv.cluster.ask", "end_node_actor", "kill"): "for a person; Ray's own RPC deadline",
    ("raykv.cluster.ask", "describe", "kill"): "off vLLM's threads; Ray's own RPC deadline",
    ("raykv.client.pools", "stop_actors", "kill"): "for a person; Ray's own RPC deadline",
    ("raykv.cluster.ask", "find", "get_actor"): "for a person, or off vLLM's threads; the same",
    ("raykv.stream.publisher", "_node_places", "nodes"): "a thread of its own; Ray's RPC deadline",
    ("raykv.stream.publishing", "stop_publisher", "kill"): "for a person; the same",
    ("raykv.node.peers", "_handle", "get_actor"): "inside of `within`",
    ("raykv.node.reports", "_call", "get_actor"): "inside of `within`",
    ("raykv.engine.lines", "_listen", "recv"): "MSG_DONTWAIT",
    ("raykv.engine.lines", "_send", "sendall"): "SO_SNDTIMEO, set when it is connected",
    ("raykv.cluster.ask", "named_actors", "list_named_actors"): "for a person; the same",
    ("raykv.cluster.join", "_speaks", "sendall"): "`settimeout`",
    ("raykv.cluster.join", "_speaks", "recv"): "`settimeout`",
}
"""By module, function and call: what bounds a wait that has no time-out."""

HARMLESS = {0, 1000}
"""What is no time: "don't wait", and milliseconds in a second."""

SLEEPS = {"sleep"}


@dataclass(frozen=True)
class Place:
    """Where a call is."""

    module: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}, line {self.line}"


def calls_of(tree: ast.Module, module: str) -> Iterator[tuple[Place, ast.Call]]:
    """Every call, with the innermost function that it is in."""
    owners: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Outer functions come first.
            owners |= {id(inner): node.name for inner in ast.walk(node) if inner is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield Place(module, owners.get(id(node), ""), node.lineno), node


def name_of(call: ast.Call) -> str:
    """The last part: `wait` for `self._lock.wait(1)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def timeout_of(call: ast.Call) -> ast.expr | None:
    """The argument that says how long a call may wait."""
    for keyword in call.keywords:
        if keyword.arg in ("timeout", "timeout_s", "deadline_s"):
            return keyword.value
    if ast.unparse(call.func) in TIMED_BY_KEYWORD:
        return None
    name = name_of(call)
    if not waits(call) and name not in SLEEPS:
        return None
    position = 0 if name in SLEEPS else TIMED.get(name)
    if position is None and is_queue(call):
        position = {"get": 1, "put": 2}[name]
    if position is None or len(call.args) <= position:
        return None
    return call.args[position]


def is_queue(call: ast.Call) -> bool:
    """Whether it is `get` or `put` of a queue, which is called one."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("get", "put"):
        return False
    return "queue" in ast.unparse(call.func.value).lower()


def waits(call: ast.Call) -> bool:
    """Whether a call is one that waits."""
    whole, name = ast.unparse(call.func), name_of(call)
    if whole in TIMED_BY_KEYWORD | UNTIMED_NAMES or is_queue(call):
        return True
    if name in ("wait_readable", "within"):
        return True
    if not isinstance(call.func, ast.Attribute) or is_text(call) or whole == "logger.exception":
        return False
    return name in TIMED or name in UNTIMED


def is_text(call: ast.Call) -> bool:
    """Whether it is `join` of strings, or `select` of rows: not of what is called a thread."""
    assert isinstance(call.func, ast.Attribute)
    owner = ast.unparse(call.func.value).lower()
    return call.func.attr == "join" and len(call.args) == 1 and "thread" not in owner


def untimed(tree: ast.Module, module: str) -> list[str]:
    """Waits without an end, one sentence each."""
    return [
        f"{place}: `{ast.unparse(call)}` waits without a deadline"
        for place, call in calls_of(tree, module)
        if waits(call)
        and timeout_of(call) is None
        and (module, place.function, name_of(call)) not in BOUNDED
    ]


def unnamed(tree: ast.Module, module: str) -> list[str]:
    """Numbers that are times to wait and have no name."""
    found = []
    for place, call in calls_of(tree, module):
        timeout = timeout_of(call)
        if (module, place.function) in FRACTIONS:
            continue
        if timeout is not None and (number := number_in(timeout)) is not None:
            found.append(f"{place}: {number} has no name: `{ast.unparse(call)}`")
    return found


def named_times(source: str) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign, bool]]:
    """A module's named times, and whether the reason is written above or below."""
    body, lines = ast.parse(source).body, source.splitlines()
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        for name, value in assigned(node):
            if name.endswith(("_S", "_SECONDS")) and number_in(value) is not None:
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                above = lines[node.lineno - 2].startswith("#")
                below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                yield name, node, above or below


FRACTIONS = {("raykv.node.fetch", "_receive")}
"""Where what is left of a named time is divided."""


def number_in(expression: ast.expr) -> float | None:
    """A number that somebody chose, in an expression."""
    for node in ast.walk(expression):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value not in HARMLESS:
            return value
    return None


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
        yield node.target.id, node.value


def test_every_wait_has_a_deadline() -> None:
    assert len(SOURCES) > 50
    found = []
    for path in SOURCES:
        found += untimed(ast.parse(path.read_text()), module_name(path))
    assert not found, "\n".join(found)


def test_every_time_to_wait_is_named() -> None:
    found = []
    for path in SOURCES:
        module = module_name(path)
        if is_shell(module):
            found += unnamed(ast.parse(path.read_text()), module)
    assert not found, "\n".join(found)


def test_pure_modules_wait_for_nothing() -> None:
    for path in SOURCES:
        module = module_name(path)
        if not is_shell(module):
            calls = calls_of(ast.parse(path.read_text()), module)
            assert not [
                place
                for place, call in calls
                if waits(call) and (module, place.function, name_of(call)) not in BOUNDED
            ], module


def test_list_of_bounded_waits_has_nothing_that_is_not_there() -> None:
    there = {
        (place.module, place.function, name_of(call))
        for path in SOURCES
        for place, call in calls_of(ast.parse(path.read_text()), module_name(path))
    }
    assert set(BOUNDED) <= there, set(BOUNDED) - there


def test_every_named_time_has_a_reason_and_is_used() -> None:
    texts = {module_name(path): path.read_text() for path in SOURCES}
    words = Counter(re.findall(r"\w+", "\n".join(texts.values())))
    named = 0
    for module, text in texts.items():
        if module != DEADLINES and not is_shell(module):
            continue
        for name, _, has_reason in named_times(text):
            named += 1
            assert has_reason, f"{module}.{name} has no reason"
            assert words[name] > 1, f"nobody uses {module}.{name}"
    assert named > 30


def test_only_shared_times_stand_in_the_table() -> None:
    """A time that one module has stands there."""
    texts = {module_name(path): path.read_text() for path in SOURCES}
    for name, _, _ in named_times(texts.pop(DEADLINES)):
        users = [module for module, text in texts.items() if re.search(rf"\b{name}\b", text)]
        assert len(users) > 1, f"{name} belongs to {users}"


@pytest.mark.parametrize(
    "source",
    [
        "event.wait()",
        "thread.join()",
        "self._thread.join()",
        "future.result()",
        "ray.get(ref)",
        "ray.wait([ref])",
        "ray.init()",
        "self._queue.get()",
        "self._queue.put(1)",
        "lock.acquire()",
        "sock.recv(1)",
        "sock.sendall(b'')",
        "listener.accept()",
        "process.wait()",
        "process.communicate()",
        "subprocess.run(['true'])",
        "select.select([fd], [], [])",
        "wire.wait_readable([fd])",
        "socket.create_connection(('host', 1))",
        "psutil.wait_procs(all)",
        "def f():\n    def g():\n        event.wait()",
    ],
)
def test_wait_without_a_deadline_is_found(source: str) -> None:
    assert len(untimed(ast.parse(source), "raykv.node.actor")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "event.wait(LOOK_S)",
        "event.wait(timeout=LOOK_S)",
        "thread.join(STOP_S)",
        "ray.get(ref, timeout=LOOK_S)",
        "queue.get(timeout=LOOK_S)",
        "counts.get(key)",
        "', '.join(names)",
        "mode.join(names)",
        "time.sleep(LOOK_S)",
        "select.select([fd], [], [], LOOK_S)",
    ],
)
def test_wait_with_a_named_deadline_is_fine(source: str) -> None:
    tree = ast.parse(source)
    assert untimed(tree, "raykv.node.actor") == unnamed(tree, "raykv.node.actor") == []


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(0.1)",
        "event.wait(5)",
        "event.wait(max(1.0, left))",
        "thread.join(timeout=2)",
        "ray.get(ref, timeout=3.0)",
        "cluster.find(timeout_s=3.0)",
        "select.select([fd], [], [], 0.5)",
    ],
)
def test_number_that_somebody_waits_for_is_found(source: str) -> None:
    assert len(unnamed(ast.parse(source), "raykv.node.actor")) == 1


@pytest.mark.parametrize(
    "source",
    ["LOOK_S = 0.1", "LOOK_S: float = 0.1", "PAUSES_S = (0.1, 2.0)", "TWICE_S = 2 * LOOK_S"],
)
def test_named_time_without_a_reason_is_found(source: str) -> None:
    def reasons(text: str) -> list[bool]:
        return [has_reason for _, _, has_reason in named_times(text)]

    assert reasons(f"import time\n\n{source}\n") == [False]
    assert reasons(f"# Between two looks.\n{source}\n") == [True]
    assert reasons(f'{source}\n"""Between two looks."""\n') == [True]


def test_deadlines_that_users_count_on_are_named() -> None:
    """Sync, fetch, copy job, attach, flush, shutdown."""
    for setting in ("request", "step", "start"):
        assert getattr(raykv.base.settings.Settings, f"{setting}_deadline_s") > 0
    times = {
        name: ast.literal_eval(node.value)
        for path in SOURCES
        for name, node, _ in named_times(path.read_text())
        if name in ("SESSION_STOP_S", "LINK_CLOSE_S", "LEAVE_S", "NODE_STOP_S") and node.value
    }
    assert len(times) == 4
    for seconds in times.values():
        assert 0 < seconds <= 5
