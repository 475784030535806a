"""What goes first, of the chunks of one slot size."""

from __future__ import annotations

from collections.abc import Iterable

from raykv.base.ids import Key, Namespace, Stamp
from raykv.node.pool.order import EvictionOrder
from raykv.node.pool.records import ChunkRecord, Standing


def chunk(name: str) -> ChunkRecord:
    return ChunkRecord(Namespace("n"), Key(name.encode()), 4096, Stamp(0, 1))


def chunks(names: str) -> list[ChunkRecord]:
    return list(map(chunk, names))


def named(records: Iterable[ChunkRecord]) -> str:
    return "".join(record.key.decode() for record in records)


def entered(names: str) -> tuple[EvictionOrder, dict[str, ChunkRecord]]:
    order, records = EvictionOrder(), chunks(names)
    for record in records:
        order.enter([record])
    return order, dict(zip(names, records, strict=True))


def test_tail_of_a_prompt_goes_before_its_head() -> None:
    order = EvictionOrder()
    order.enter(chunks("abc"))
    order.enter(chunks("de"))
    assert named(order) == "cbaed"


def test_chunks_of_a_store_that_become_ready_one_by_one_are_in_the_same_order() -> None:
    order = EvictionOrder()
    a, b, c = chunks("abc")
    order.enter([a])
    order.enter(chunks("x"))
    assert a.queue is not None
    order.enter([b], {a.queue: a})
    order.enter([c], {a.queue: b})
    assert named(order) == "cbax"


def test_order_is_that_of_last_use_at_first() -> None:
    order, records = entered("abcdefgh")
    order.touch([records["a"]])
    order.enter(chunks("ij"))
    assert named(order) == "bcdefghaji"
    order, records = entered("abcdefgh")
    order.touch([records["g"], records["h"]])
    order.enter(chunks("i"))
    assert named(order) == "abcdefhgi"


def test_released_ones_go_first_then_spares_and_kept_ones_last() -> None:
    order, records = entered("abcdef")
    order.stand(records["a"], Standing.KEPT)
    order.stand(records["d"], Standing.SPARE)
    order.stand(records["e"], Standing.RELEASED)
    order.stand(records["b"], Standing.PINNED)
    assert named(order) == "edcfa"
    assert len(order) == 6
    order.touch([records["e"]])
    assert named(order) == "dcfea"
    order.stand(records["b"], Standing.NORMAL)
    assert named(order) == "dcfeba"


def test_what_is_spare_no_more_goes_late_until_its_turn_comes_to_be_unmarked() -> None:
    order, records = entered("abcdef")
    for name in "bd":
        order.stand(records[name], Standing.SPARE)
    order.stand(records["e"], Standing.KEPT)
    order.touch([records["b"]])
    assert named(order) == "dbacfe"
    order.forget_spares()
    assert named(order) == "acfdbe"
    order.touch([records["b"]])
    assert records["b"].standing is Standing.NORMAL
    assert order.unmark(9) == 1
    assert order.unmark(9) == 0
    assert {record.standing for record in order} == {Standing.NORMAL, Standing.KEPT}
    order.stand(records["f"], Standing.SPARE)
    assert named(order).startswith("f")


def test_what_comes_back_counts_as_found() -> None:
    order, records = entered("abcdefgh")
    order.leave(records["a"], remember=True)
    order.leave(records["b"], remember=False)
    order.enter([chunk("a")])
    order.enter([chunk("b")])
    order.enter([chunk("i")])
    assert named(order).startswith("cdefgh")
    assert [record.key for record in order if record.hits] == [b"a"]


def hits_of(order: EvictionOrder, requests: Iterable[Iterable[int]], room: int) -> list[int]:
    """Which chunks are found, of requests that have one prefix each."""
    held: dict[int, ChunkRecord] = {}
    hits = []
    for request in requests:
        names = list(request)
        present = [held[name] for name in names if name in held]
        hits.append(len(present))
        order.touch(present)
        missing = [name for name in names if name not in held]
        over = len(held) + len(missing) - room
        may_go = frozenset(held.values()) - frozenset(present)
        for record in order.first(max(over, 0), may_go.__contains__):
            order.leave(record, remember=True)
            del held[int(record.key)]
        new = [chunk(str(name)) for name in missing]
        held.update(zip(missing, new, strict=True))
        order.enter(new)
    return hits


def test_flood_of_new_prompts_leaves_what_is_used_along_with_it() -> None:
    room, used = 1000, range(400)
    # A flood of twice the room between two uses: by last use alone nothing would ever be found.
    flood = iter(range(10_000, 10_000_000))
    requests: list[list[int]] = []
    for _ in range(40):
        requests.append(list(used))
        requests += [[next(flood) for _ in range(100)] for _ in range(20)]
    order = EvictionOrder()
    hits = hits_of(order, requests, room)
    assert sum(hits[: len(hits) // 4]) < sum(hits[-len(hits) // 4 :])
    assert sum(hits[-len(hits) // 4 :]) >= 0.9 * 10 * len(used)
    assert not any(record.hits for record in order.first(100, lambda _: True))


def test_head_of_all_prompts_says_nothing_about_the_rest() -> None:
    # It is most of what is found, however a sample is drawn.
    room, head, flood = 1000, range(10**6, 10**6 + 40), iter(range(10_000, 10**6))
    requests: list[list[int]] = []
    for _ in range(40):
        requests.append([*head, *range(40)])
        requests += [[*head, *(next(flood) for _ in range(100))] for _ in range(20)]
    found = hits_of(EvictionOrder(), requests, room)[::21]
    assert sum(found[-10:]) >= 0.9 * 10 * 80


def test_what_is_no_longer_used_goes_when_others_are() -> None:
    room, flood = 1000, iter(range(10_000, 10_000_000))
    requests: list[list[int]] = []
    for used in (range(400), range(400, 800), range(800, 1200)):
        for _ in range(30):
            requests.append(list(used))
            requests += [[next(flood) for _ in range(100)] for _ in range(20)]
    hits = hits_of(EvictionOrder(), requests, room)
    for end in (1, 2, 3):
        last = hits[(end * 30 - 10) * 21 : end * 30 * 21]
        assert sum(last) >= 0.9 * 10 * 400


def test_order_of_last_use_is_kept_where_it_is_right() -> None:
    # Each prompt is asked for twice, the second time when the pool is nearly full of others.
    room = 1000
    requests: list[list[int]] = []
    for number in range(600):
        requests.append([number * 100 + at for at in range(100)])
        if number >= 8:
            requests.append(requests[-1 - 2 * 8 + 8] if number < 16 else requests[-16])
    hits = hits_of(EvictionOrder(), requests, room)
    again = hits[len(hits) // 2 :]
    assert sum(again) >= 0.95 * 100 * len(again) / 2


def test_memory_of_what_went_is_bounded() -> None:
    order = EvictionOrder()
    for number in range(5000):
        record = chunk(str(number))
        order.enter([record])
        if number >= 100:
            order.leave(next(iter(order)), remember=True)
    assert len(order) == 100
    assert 100 < order._memory.count <= 2 * 101 + 1
