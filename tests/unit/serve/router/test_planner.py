"""From a request to an order of replicas: deadlines, bounds and fall-backs, without Ray or vLLM."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.cluster.breaker import Pauses
from raykv.prompts.block_hashes import DEFAULT_SEED, PLAIN, HashScheme, seed_digest
from raykv.prompts.lookup import PromptScheme
from raykv.prompts.prompt_keys import PromptHasher, PromptKeys, PromptTokens
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.descriptions import ChunkGroup
from raykv.protocol.framing import decode, encode
from raykv.protocol.reader import PrefixPage, PrefixQuery, SpacePage
from raykv.protocol.status import NamespaceStatus
from raykv.serve.arguments import ModelArguments
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router import directory as directories
from raykv.serve.router import rendering
from raykv.serve.router.directory import ROUTE_ANSWER_S, AskedDirectory, FoundPrompt
from raykv.serve.router.planner import PlacedRequest, RoutePlanner
from raykv.serve.router.rank import Candidate
from raykv.serve.router.rendering import MOST_BODY_BYTES, Fallback, PromptRenderer
from raykv.serve.router.settings import RouteSettings, kv_router_kwargs, parse_route_settings
from tests.fixtures.waiting import until

GROUP = ChunkGroup(0, 16)
SCHEME = PromptScheme(HashScheme("sha256", DEFAULT_SEED, 16), (GROUP,))
TRAITS = {
    "hash_algorithm": "sha256",
    "hash_seed": seed_digest(DEFAULT_SEED),
    "tokens_per_hash": "16",
    "chunks": "0:16",
}
SPACE = NamespaceStatus("space", "/models/m", traits=TRAITS)
REPLICAS = [Candidate("r1", "n1"), Candidate("r2", "n2")]
PATIENCE_S = 20.0


def request(body: bytes = b"{}", path: str = "/v1/completions") -> HttpRequest:
    return HttpRequest("POST", path, b"", [], body)


def asking(first: int, length: int) -> HttpRequest:
    """A request with such a prompt in its text, too."""
    tokens = prompt(first, length).tokens
    return request(json.dumps({"model": "m", "prompt": list(tokens)}).encode())


def prompt(first: int, length: int) -> PromptTokens:
    return PromptTokens([first, *range(length - 1)], PLAIN)


class PlayedRenderer:
    def __init__(self, answer: list[PromptTokens] | Fallback) -> None:
        self.answer = answer

    async def render(self, _request: HttpRequest) -> list[PromptTokens] | Fallback:
        return self.answer


class PlayedDirectory:
    def __init__(self, **on_nodes: int) -> None:
        self.hasher: PromptHasher | None = PromptHasher(SCHEME)
        self.on_nodes = on_nodes
        self.answers = True

    async def find(self, prompts: Sequence[PromptKeys]) -> list[FoundPrompt] | None:
        most = max(self.on_nodes.values(), default=0)
        return [FoundPrompt(self.on_nodes, most) for _ in prompts] if self.answers else None


def planner(
    directory: PlayedDirectory,
    renderer: PlayedRenderer | list[PromptTokens] | Fallback,
    now: Callable[[], float] = lambda: 0.0,
) -> RoutePlanner:
    played = renderer if isinstance(renderer, PlayedRenderer) else PlayedRenderer(renderer)
    return RoutePlanner(played.render, directory, RouteSettings(recent_s=30.0), now)


def placed_at(made: RoutePlanner, asked: HttpRequest) -> PlacedRequest:
    found = asyncio.run(made.place(asked))
    assert isinstance(found, PlacedRequest)
    return found


def sent(made: RoutePlanner, asked: HttpRequest, to: Candidate) -> PlacedRequest:
    """A request that a replica has taken; the planner may have meant another one."""
    placed = placed_at(made, asked)
    made.choose(placed, REPLICAS)
    made.went(placed, to)
    return placed


def test_request_goes_to_the_node_that_has_its_prompt() -> None:
    made = planner(PlayedDirectory(n2=64), [prompt(1, 100)])
    placed = placed_at(made, request())
    assert [choice.name for choice in made.choose(placed, REPLICAS)] == ["r2", "r1"]


def test_prompt_that_was_sent_somewhere_follows_it_even_if_another_replica_took_it() -> None:
    made = planner(PlayedDirectory(), [prompt(1, 200)])
    made.began(sent(made, asking(1, 200), REPLICAS[1]))
    again = placed_at(made, asking(1, 200))
    works = {choice.name: choice.work for choice in made.choose(again, REPLICAS)}
    # Both are believed to have it: the one that it was meant for, and the one that took it.
    assert works["r1"] == works["r2"] < 50


def test_new_prompts_are_spread_by_the_work_that_was_sent() -> None:
    renderer, replicas = PlayedRenderer([]), {each.name: each for each in REPLICAS}
    made = planner(PlayedDirectory(), renderer)
    went = []
    for number, length in enumerate((90, 30, 30, 30, 40, 40)):
        renderer.answer = [prompt(1000 + number, length)]
        placed = placed_at(made, asking(1000 + number, length))
        went.append(made.choose(placed, REPLICAS)[0].name)
        made.went(placed, replicas[went[-1]])
        made.began(placed)
    assert went == ["r1", "r2", "r2", "r2", "r1", "r2"]


def test_memory_that_knows_most_of_a_text_asks_nobody() -> None:
    renderer = PlayedRenderer([prompt(1, 2000)])
    made = planner(PlayedDirectory(), renderer)
    made.keep(["r1", "r2"])
    sent(made, asking(1, 2000), REPLICAS[1])
    renderer.answer = Fallback.BUSY
    turn = placed_at(made, asking(1, 2200))
    assert (turn.silence, bool(turn.found)) == (None, False)
    assert placed_at(made, asking(1, 4000)).silence is Fallback.BUSY, "half of it is new"
    made.keep(["r3"])
    again = placed_at(made, asking(1, 2200))
    assert again.silence is Fallback.BUSY, "nobody is there who has it"


def test_work_waits_at_a_replica_until_the_first_token_or_the_end() -> None:
    made = planner(PlayedDirectory(), [prompt(1, 1000)])
    sent = [placed_at(made, asking(number, 1000)) for number in range(2)]
    for each in sent:
        assert made.choose(each, REPLICAS[:1])[0].cost == 1000 + 350 * sent.index(each)
        made.went(each, REPLICAS[0])
    other = placed_at(made, asking(7, 1000))
    assert made.choose(other, REPLICAS)[0].name == "r2"
    made.began(sent[0])
    made.ended(sent[0])
    made.ended(sent[1])
    assert [choice.cost for choice in made.choose(other, [REPLICAS[0]])] == [1000]


def test_what_has_been_computed_is_in_the_pool_of_its_node() -> None:
    made = planner(PlayedDirectory(), [prompt(1, 2000)])
    first = placed_at(made, asking(1, 2000))
    made.choose(first, [REPLICAS[0]])
    made.went(first, REPLICAS[0])
    again = placed_at(made, asking(1, 2000))
    # A replica that is asked about is believed to compute it: each is asked about once.
    others = (Candidate(name, node) for name, node in zip("abcd", ["n1", "n2"] * 2, strict=True))
    works = [made.choose(again, [next(others)])[0].work for _ in range(2)]
    assert works == [pytest.approx(again.trail.num_tokens)] * 2
    made.began(first)
    near, far = (made.choose(again, [each])[0].work for each in others)
    assert near < far < works[0]


def test_reason_for_falling_back_is_told() -> None:
    directory = PlayedDirectory()
    told = planner(directory, Fallback.NOT_LOADED)
    assert asyncio.run(told.place(request(path="/tokenize"))) is Fallback.NO_PROMPT
    assert placed_at(told, request()).silence is Fallback.NOT_LOADED
    directory.hasher = None
    assert (
        placed_at(planner(directory, [prompt(1, 100)]), request()).silence is Fallback.NO_NAMESPACE
    )


TURN = "Vronsky's horse has fallen at the last fence but one. " * 60
USER = {"role": "user", "content": TURN}
SAID, ASKED = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And she?"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PICTURE = {"type": "image_url"}
AGENT_TURNS: dict[str, list[dict[str, Any]]] = {
    "/v1/messages": [
        {"messages": messages, "system": "Be brief."} for messages in ([USER], [USER, SAID, ASKED])
    ],
    "/v1/responses": [{"instructions": TURN, "input": asked} for asked in ([ASKED], [ASKED, CALL])],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": [PICTURE, TURN, *more]}]}
        for more in ([], ["go on"])
    ],
}


@pytest.mark.parametrize("path", AGENT_TURNS)
def test_turn_whose_tokens_nobody_knows_follows_the_one_before(path: str) -> None:
    made = planner(PlayedDirectory(), Fallback.NOT_UNDERSTOOD)
    names = [each.name for each in REPLICAS]
    made.keep(names)
    first, second = (
        request(json.dumps({"model": "m", **body}).encode(), path) for body in AGENT_TURNS[path]
    )
    made.began(sent(made, first, REPLICAS[1]))
    for other in range(4):
        made.went(placed_at(made, asking(other, 10)), REPLICAS[0])
    made.keep(["r2"])
    turn = placed_at(made, second)
    assert (made.remembers(turn), turn.silence, bool(turn.found)) == (True, None, False)
    made.keep(names)
    works = {each.name: each.work for each in made.choose(turn, REPLICAS)}
    assert works["r2"] < turn.trail.num_tokens / 3


def test_request_follows_its_beginning_while_the_directory_is_silent() -> None:
    directory, now = PlayedDirectory(), [0.0]
    made = planner(directory, [prompt(1, 100)], lambda: now[0])
    directory.answers = False
    first = placed_at(made, asking(1, 300))
    assert (first.silence, made.remembers(first)) == (Fallback.NO_ANSWER, False)
    made.began(sent(made, asking(1, 300), REPLICAS[0]))
    turn = placed_at(made, asking(1, 600))
    assert (turn.silence, made.remembers(turn)) == (Fallback.NO_ANSWER, True)
    assert made.choose(turn, REPLICAS)[0].name == "r1"
    now[0] = 31.0
    assert not made.remembers(turn)


# The renderer's thread


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "ROUTE_RENDER_S", PATIENCE_S)


def rendered(renderer: PromptRenderer, *requests: HttpRequest) -> list[Any]:
    async def all_at_once() -> list[Any]:
        return list(await asyncio.gather(*map(renderer.render, requests)))

    return asyncio.run(all_at_once())


@pytest.mark.usefixtures("patient")
def test_loading_neither_waits_nor_is_waited_for() -> None:
    may_load = threading.Event()

    def load() -> Any:
        assert may_load.wait(PATIENCE_S)
        return lambda _path, _body: [prompt(1, 20)]

    renderer = PromptRenderer(load)
    assert rendered(renderer, request()) == [Fallback.NOT_LOADED]
    may_load.set()
    renderer._thread.submit(lambda: None).result(PATIENCE_S)
    assert rendered(renderer, request()) == [[prompt(1, 20)]]
    renderer._thread.shutdown()


@pytest.mark.usefixtures("patient")
def test_request_that_is_no_plain_prompt_falls_back() -> None:
    def render(_path: str, body: bytes) -> list[PromptTokens] | None:
        if body == b"raise":
            raise ValueError(body)
        return None

    bodies = [b"raise", b"none", b"x" * (MOST_BODY_BYTES + 1)]
    asked = [request(path="/tokenize"), *map(request, bodies)]
    found = rendered(loaded(lambda: render), *asked)
    assert found == [Fallback.NO_PROMPT] + [Fallback.NOT_UNDERSTOOD] * 3


def test_request_that_would_wait_for_the_thread_is_not_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def render(_path: str, _body: bytes) -> list[PromptTokens] | None:
        go_on.wait(PATIENCE_S)
        return [prompt(1, 20)]

    monkeypatch.setattr(rendering, "MOST_WAITING", 2)
    renderer = loaded(lambda: render)
    # The first waits for its deadline, the second too, the third not at all.
    assert rendered(renderer, *[request()] * 3) == [Fallback.BUSY] * 3
    go_on.set()
    renderer._thread.submit(lambda: None).result(PATIENCE_S)
    monkeypatch.setattr(rendering, "ROUTE_RENDER_S", PATIENCE_S)
    assert rendered(renderer, request()) == [[prompt(1, 20)]]


def test_tokenizer_that_can_not_be_loaded_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Any:
        raise SystemExit(2)

    assert rendered(loaded(load), request(), request()) == [Fallback.NOT_LOADED] * 2
    assert len([r for r in caplog.records if "tokenizer" in r.getMessage()]) == 1


def loaded(load: Callable[[], Any]) -> PromptRenderer:
    renderer = PromptRenderer(load)
    renderer._thread.submit(lambda: None).result(PATIENCE_S)
    return renderer


# The directory


def method(call: Callable[..., Awaitable[bytes]]) -> SimpleNamespace:
    """As Ray's actors have them."""
    return SimpleNamespace(remote=call)


class PlayedActor:
    """A scheduler actor that has everything asked for on node n1, and may hang."""

    def __init__(self) -> None:
        self.known = [SPACE]
        self.hangs = False
        self.asked: list[PrefixQuery] = []
        self.prefixes = method(self._prefixes)
        self.spaces = method(self._say_spaces)

    async def _say_spaces(self) -> bytes:
        nodes = [["n1", "n2"]] * len(self.known)
        return encode(SpacePage(self.known, nodes))

    async def _prefixes(self, raw: bytes) -> bytes:
        query = decode(raw, PrefixQuery)
        self.asked.append(query)
        await asyncio.sleep(PATIENCE_S if self.hangs else 0)
        tokens = [count * 16 for count in query.counts]
        return encode(PrefixPage(["n1"], tokens, tokens))


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> PlayedActor:
    """The one that is found; its answers have all the time they need."""
    made = PlayedActor()
    monkeypatch.setattr(directories, "_look_up", lambda: made)
    monkeypatch.setattr(directories, "ROUTE_ANSWER_S", PATIENCE_S)
    return made


async def learned() -> AskedDirectory:
    """It has asked for its namespace."""
    made = AskedDirectory("/models/m")
    made.learn(["n1"])
    assert made._learning is not None
    await made._learning
    return made


def keys(seed: int, tokens: int) -> PromptKeys:
    return PromptHasher(SCHEME).keys(prompt(seed, tokens), MAX_KEYS)


async def test_questions_that_come_meanwhile_go_out_together(actor: PlayedActor) -> None:
    made = await learned()
    prompts = [[keys(n, 16 * n), keys(n, 32)] for n in range(1, 9)]
    found = await asyncio.gather(*map(made.find, prompts))
    assert found == [
        [FoundPrompt({"n1": tokens}, tokens) for tokens in (16 * number, 32)]
        for number in range(1, 9)
    ]
    assert len(actor.asked) <= 2
    assert all(query.namespace == "space" for query in actor.asked)


async def test_prompts_with_chunks_of_other_sizes_are_asked_about_apart(actor: PlayedActor) -> None:
    """Of a long prompt with windows fewer, larger chunks are asked for."""
    made = await learned()
    short = keys(1, 64)
    long = replace(keys(2, 192), keys={ChunkGroup(0, 64): keys(2, 192).keys[GROUP][3::4]})
    found = await made.find([short, long, short])
    assert found is not None
    assert [each.anywhere for each in found] == [64, 48, 64]
    asked = sorted((query.chunks, query.counts) for query in actor.asked)
    assert asked == [("0:16", [4]), ("0:16", [4]), ("0:64", [3])]


async def test_question_is_never_longer_than_a_page(actor: PlayedActor) -> None:
    made = await learned()
    long = keys(1, 16 * 1024)
    found = await asyncio.gather(*(made.find([long]) for _ in range(5)))
    assert all(answer is not None for answer in found)
    assert len(actor.asked) == 3
    assert all(len(query.keys) <= MAX_KEYS for query in actor.asked)


async def test_directory_that_hangs_costs_a_deadline_once_then_nothing(
    actor: PlayedActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "ROUTE_ANSWER_S", ROUTE_ANSWER_S)
    made = await learned()
    actor.hangs = True
    loop = asyncio.get_running_loop()
    assert await asyncio.gather(*(made.find([keys(n, 64)]) for n in range(9))) == [None] * 9
    await until(lambda: made._asking is not None and made._asking.done())
    began = loop.time()
    for n in range(20):
        assert await made.find([keys(n, 64)]) is None
    assert loop.time() - began < ROUTE_ANSWER_S * 20
    assert len(actor.asked) == 1
    # It is found again once its pause is over.
    actor.hangs = False
    made._breakers.pauses = Pauses(0.0, 0.0)
    async with asyncio.timeout(PATIENCE_S):
        while await made.find([keys(1, 64)]) is None:
            await asyncio.sleep(0.01)


async def test_namespace_is_that_of_the_models_engines_on_the_replicas_nodes(
    actor: PlayedActor,
) -> None:
    other = NamespaceStatus("other", "/models/other", traits=TRAITS)
    twin = NamespaceStatus("second", "/models/m", traits=TRAITS)
    actor.known = [other, SPACE]
    known = await learned()
    assert await known.find([keys(1, 15)]) == [FoundPrompt({}, 0)]
    assert actor.asked == [], "a short prompt asks nobody"
    await known.find([keys(1, 64)])
    assert actor.asked[0].namespace == "space"
    for actor.known in ([other], [SPACE, twin]):
        unknown = await learned()
        assert (unknown.hasher, await unknown.find([keys(1, 64)])) == (None, None)


# Settings


@pytest.mark.parametrize(
    "wrong",
    [{"laod": 0.1}, {"load": 0.9, "fetch": 0.1}, {"request": -1}, {"recent_s": -1}, {"load": "x"}],
    ids=str,
)
def test_setting_that_can_not_be_meant_is_refused_when_the_application_is_built(
    wrong: dict[str, Any],
) -> None:
    model = ModelArguments(model="m", router={"policy": "kv", "kwargs": wrong})  # type: ignore[arg-type]
    with pytest.raises(SettingError):
        kv_router_kwargs(model)


def test_model_without_the_cache_is_not_placed_by_it() -> None:
    model = ModelArguments(model="m", raykv=None, router={"policy": "kv"})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="raykv: null"):
        kv_router_kwargs(model)


def test_router_gets_its_model_and_all_settings() -> None:
    model = ModelArguments(model="m", router={"policy": "kv", "kwargs": {"load": 0.1}})  # type: ignore[arg-type]
    kwargs = kv_router_kwargs(model)
    assert ModelArguments.model_validate(kwargs.pop("model")) == model
    assert parse_route_settings(kwargs) == RouteSettings(load=0.1)
