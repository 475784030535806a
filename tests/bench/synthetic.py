"""Seeded synthetic traces, one of each kind of traffic.

A request is the list of its chunks, from the head of the prompt; equal numbers mean equal prefixes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import accumulate, count, cycle
from random import Random

from raykv.inspect.trace_files import Request

SEED = 1


def synthetic(num_requests: int) -> dict[str, list[Request]]:
    """A trace of each kind by name."""
    kinds: dict[str, Callable[[Random, int], list[Request]]] = {
        "documents": documents,
        "chats": chats,
        "one-off prompts": one_off_prompts,
        "shifting": shifting,
        "agents": agents,
        "loops": loops,
        "tenants": tenants,
    }
    return {name: make(Random(SEED), num_requests) for name, make in kinds.items()}


def documents(random: Random, num_requests: int) -> list[Request]:
    """Questions about documents, some of which are asked about far more often than others."""
    new = count()
    files = [_chunks(new, random.randint(4, 40)) for _ in range(num_requests // 5)]
    weights = list(accumulate(1 / rank for rank in range(1, len(files) + 1)))
    chosen = random.choices(files, cum_weights=weights, k=num_requests)
    return [[*file, *_chunks(new, random.randint(1, 3))] for file in chosen]


def chats(random: Random, num_requests: int) -> list[Request]:
    """Chats under one system prompt: each turn has all earlier ones as its prefix; people think
    for about as long as it takes 200 others to speak, and half of them then say no more.
    """
    new = count()
    system = _chunks(new, 2)
    requests: list[Request] = []
    # When somebody speaks next, whose turn it is, and the chat so far.
    waiting: list[tuple[float, int, Request]] = []
    for number in range(num_requests):
        if waiting and waiting[0][0] <= number:
            _, _, chat = heapq.heappop(waiting)
            chat = [*chat, *_chunks(new, random.randint(1, 4))]
        else:
            chat = [*system, *_chunks(new, random.randint(2, 30))]
        requests.append(chat)
        if random.random() < 0.5:
            think = number + 20 + random.expovariate(1 / 200)
            heapq.heappush(waiting, (think, number, chat))
    return requests


def one_off_prompts(random: Random, num_requests: int) -> list[Request]:
    """Long prompts that never come again, between uses of a few system prompts."""
    new = count()
    systems = [_chunks(new, random.randint(5, 20)) for _ in range(max(1, num_requests // 25))]
    requests = []
    for _ in range(num_requests):
        hot = random.choice(systems) if random.random() < 0.6 else []
        requests.append([*hot, *_chunks(new, random.randint(2, 30))])
    return requests


def shifting(random: Random, num_requests: int) -> list[Request]:
    """Documents again, but those in use are others from time to time."""
    new = count()
    requests = []
    for _ in range(5):
        files = [_chunks(new, random.randint(4, 40)) for _ in range(num_requests // 40)]
        for _ in range(num_requests // 5):
            file = files[int(len(files) * random.random() ** 2)]
            requests.append([*file, *_chunks(new, random.randint(1, 3))])
    return requests


def agents(random: Random, num_requests: int) -> list[Request]:
    """Agents whose prompts grow with each call of a tool; now and then a call takes long, or a
    person reads what they did, and some then say no more.
    """
    new = count()
    requests: list[Request] = []
    waiting: list[tuple[float, int, Request]] = []
    for number in range(num_requests):
        if len(waiting) < 20 and random.random() < 0.1:
            heapq.heappush(waiting, (number, number, _chunks(new, random.randint(10, 60))))
        if not waiting:
            continue
        _, _, prompt = heapq.heappop(waiting)
        requests.append(prompt)
        fate = random.random()
        if fate < 0.98:
            pause = 5.0 if fate < 0.85 else random.expovariate(1 / 100)
            grown = [*prompt, *_chunks(new, random.randint(0, 4))]
            heapq.heappush(waiting, (number + pause, number, grown))
    return requests


def loops(random: Random, num_requests: int) -> list[Request]:
    """The same documents in turn, again and again, between questions about a few of them."""
    new = count()
    files = [_chunks(new, random.randint(4, 40)) for _ in range(num_requests // 8)]
    turns = cycle(files)
    return [
        random.choice(files[:5]) if random.random() < 0.3 else next(turns)
        for _ in range(num_requests)
    ]


def tenants(random: Random, num_requests: int) -> list[Request]:
    """Chats of tenants with prompts of their own, one of which sends one-off prompts in bulk."""
    rest = [chats(random, num_requests // 4) for _ in range(3)]
    parts = [*rest, one_off_prompts(random, num_requests // 4)]
    return [
        [len(parts) * chunk + tenant for chunk in parts[tenant][turn]]
        for turn in range(num_requests // 4)
        for tenant in range(len(parts))
    ]


def _chunks(new: count[int], number: int) -> Request:
    return [next(new) for _ in range(number)]
