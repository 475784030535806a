"""Eviction order, by example; the suite runs for every policy, those of the benchmark too."""

from __future__ import annotations

from random import Random

import pytest

from raykv.base.errors import SettingError
from raykv.base.settings import Settings, load_settings
from raykv.directory.manager import ManagerSettings
from raykv.directory.table import duel, worth
from raykv.directory.table.policies import DEFAULT_POLICY, LRU, POLICIES, EvictionPolicy
from raykv.directory.table.worth import Worth
from raykv.lab.bench.arc import ARC
from raykv.lab.bench.policy import COMPARED
from raykv.lab.bench.s3fifo import S3FIFO
from tests.fixtures.directory.eviction import add_all, give_up, order

A, B, C, D = (("model", name) for name in (b"a", b"b", b"c", b"d"))


@pytest.fixture(params=sorted(COMPARED))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy[tuple[str, bytes]]:
    return COMPARED[request.param]()


def lru(*names: tuple[str, bytes]) -> LRU[tuple[str, bytes]]:
    made: LRU[tuple[str, bytes]] = LRU()
    for name in names:
        made.add(name)
    return made


def test_lru_gives_up_the_oldest_first() -> None:
    assert order(lru(A, B, C, D)) == "abcd"


def test_lru_gives_up_a_touched_name_last() -> None:
    made = lru(A, B, C, D)
    made.touch(B)
    made.touch(A)
    assert order(made) == "cdba"


def test_lru_counts_a_second_add_as_a_touch() -> None:
    made = lru(A, B, C)
    made.add(A)
    assert order(made) == "bca"


def test_lru_keeps_the_order_of_the_others_when_one_is_removed() -> None:
    made = lru(A, B, C, D)
    made.remove(B)
    assert order(made) == "acd"


def test_lru_treats_a_name_that_came_back_as_new() -> None:
    made = lru(A, B, C)
    made.remove(A)
    made.add(A)
    assert order(made) == "bca"


def test_lru_gives_up_the_tail_of_a_prefix_first_when_it_is_touched_from_its_tail() -> None:
    made = lru(A, B, C, D)
    for name in (C, B, A):
        made.touch(name)
    assert order(made) == "dcba"


def test_policy_holds_what_was_added_and_not_removed(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    for name in (A, B, C):
        policy.add(name)
    policy.add(B)
    policy.remove(C)
    assert set(policy.candidates()) == {A, B}
    assert len(policy) == 2


def test_policy_ignores_names_that_it_does_not_hold(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    policy.add(A)
    policy.touch(B)
    policy.remove(C)
    assert list(policy.candidates()) == [A]
    assert len(policy) == 1


def test_policy_is_unchanged_by_looking_at_its_candidates(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    for name in (A, B, C):
        policy.add(name)
    assert list(policy.candidates()) == list(policy.candidates())
    assert len(policy) == 3


def test_policy_remembers_no_name_as_held_that_was_evicted(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    add_all(policy, "abc")
    policy.evicted(B)
    policy.evicted(B)
    policy.touch(B)
    assert set(policy.candidates()) == {A, C}
    policy.add(B)
    assert sorted(policy.candidates()) == [A, B, C]


def test_policy_gives_up_in_the_order_in_which_they_came_what_was_used_once(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    add_all(policy, "abcdefgh")
    assert order(policy) == "abcdefgh"
    assert give_up(policy, 8) == "abcdefgh"
    assert len(policy) == 0
    assert list(policy.candidates()) == []


@pytest.mark.parametrize("seed", range(5))
def test_policy_agrees_with_a_set_whatever_happens(
    policy: EvictionPolicy[tuple[str, bytes]], seed: int
) -> None:
    random = Random(seed)
    names = [("model", bytes([number])) for number in range(60)]
    held: set[tuple[str, bytes]] = set()
    for _ in range(3000):
        # Some names far more often than others.
        name = names[int(len(names) * random.random() ** 2)]
        match random.choice(["add", "add", "touch", "remove", "evicted", "evict"]):
            case "add":
                policy.add(name)
                held.add(name)
            case "touch":
                policy.touch(name)
            case "remove":
                policy.remove(name)
                held.discard(name)
            case "evicted":
                policy.evicted(name)
                held.discard(name)
            case _:
                for victim in list(policy.candidates())[: random.randint(0, 3)]:
                    policy.evicted(victim)
                    held.discard(victim)
        there = list(policy.candidates())
        assert len(there) == len(policy) == len(held)
        assert set(there) == held
        assert list(policy.candidates()) == there


@pytest.mark.parametrize("name", ["arc", "worth", "s3fifo"])
def test_policy_keeps_a_bounded_number_of_ghosts(name: str) -> None:
    made = COMPARED[name]()
    assert isinstance(made, ARC | S3FIFO | Worth)
    for number in range(3000):
        made.add(("model", number.to_bytes(4)))
        if number % 2:
            made.touch(("model", number.to_bytes(4)))
        if len(made) > 20:
            made.evicted(next(made.candidates()))
    assert 0 < made.num_ghosts <= worth.GHOSTS_PER_NAME * 20
    for name_ in list(made.candidates()):
        made.evicted(name_)
    assert made.num_ghosts <= worth.GHOSTS_PER_NAME


def test_worth_is_that_of_lru_before_there_is_anything_to_learn_from() -> None:
    random, ours = Random(1), Worth()
    theirs: LRU[tuple[str, bytes]] = LRU()
    for _ in range(worth.FEWEST_USES - 1):
        name = ("model", bytes([random.randrange(50)]))
        for policy in (ours, theirs):
            policy.add(name)
    assert list(ours.candidates()) == list(theirs.candidates())


def taught(num_uses: int = 12_000) -> Worth:
    """Has met a few names again and again, later than LRU would remember, among many others."""
    made = Worth()
    for number in range(num_uses):
        is_hot = number % 8 == 0
        made.add(("hot", bytes([number // 8 % 20])) if is_hot else ("once", number.to_bytes(4)))
        if len(made) > 60:
            made.evicted(next(made.candidates()))
    return made


def test_worth_learns_to_give_up_first_what_was_used_once() -> None:
    made = taught()
    made.add(("new", b""))
    order = [kind for kind, _ in made.candidates()]
    assert order[-20:] == ["hot"] * 20
    assert "new" in order


def test_worth_forgets_what_was_used_often_when_there_is_no_room_for_what_is_used_now() -> None:
    made, random = taught(), Random(1)
    for _ in range(4000):
        made.add(("next", bytes([random.randrange(120)])))
        if len(made) > 60:
            made.evicted(next(made.candidates()))
    assert "hot" not in {kind for kind, _ in made.candidates()}


def test_worth_keeps_the_past_of_a_name_that_was_evicted_but_not_of_one_that_was_lost() -> None:
    made = taught()
    evicted, lost = ("hot", bytes([3])), ("hot", bytes([5]))
    made.evicted(evicted)
    made.remove(lost)
    made.add(evicted)
    made.add(lost)
    order = list(made.candidates())
    assert evicted in order[-19:]
    assert lost not in order[-19:]


def width(index: int) -> int:
    """How many ages have an index: four indexes for each power of two."""
    return max(1, 2 ** (index // 4 - 1))


@pytest.mark.parametrize("index", [*range(12), worth.NUM_AGES - 1])
def test_ages_of_one_index_lie_between_its_lowest_and_the_next(index: int) -> None:
    lowest = sum(width(each) for each in range(index))
    assert worth.age_index(lowest) == worth.age_index(lowest + width(index) - 1) == index
    assert worth.age_index(lowest + width(index)) == index + 1


@pytest.mark.parametrize(
    ("together", "size"),
    [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (63, 6), (64, 7), (255, 7), (256, 8), (9999, 8)],
)
def test_sizes_of_prompts_differ_by_powers_of_two_and_later_of_four(
    together: int, size: int
) -> None:
    assert worth.size_index(together) == size


@pytest.mark.parametrize(
    ("kind", "size", "following"),
    [(worth.TAIL, 0, 10), (worth.TAIL, 3, 13), (1, 0, 10), (4, 0, 13), (4, 2, 12), (36, 8, 36)],
)
def test_name_that_is_used_again_is_of_the_kind_of_one_use_more(
    kind: int, size: int, following: int
) -> None:
    assert worth.next_kind(kind, size) == following


@pytest.mark.parametrize("queue", range(worth.NUM_QUEUES))
def test_every_queue_is_of_one_kind_and_all_but_the_first_ones_are_in_pairs(queue: int) -> None:
    kind = worth.kind_of(queue)
    assert 0 <= kind < worth.NUM_KINDS
    twins = [each for each in range(worth.NUM_QUEUES) if worth.kind_of(each) == kind]
    assert len(twins) == 1 + (kind > worth.NUM_SIZES)


def stored(made: Worth, kind: str, count: int, first: int = 0) -> list[tuple[str, bytes]]:
    """A prompt's chunks, whose tail comes first, as of a node's report."""
    names = [(kind, number.to_bytes(4)) for number in range(first, first + count)]
    for name in names:
        made.add(name, count, is_tail=name == names[0])
    return names


def by_find(made: Worth) -> Worth:
    made._duel.order = duel.BY_FIND
    return made


@pytest.mark.parametrize(
    ("handicap", "order"), [(30, duel.BY_FIND), (0, duel.BY_USE), (-30, duel.BY_USE)]
)
def test_order_by_find_leads_where_floods_would_push_out_what_is_found(
    handicap: int, order: int
) -> None:
    judged = duel.Duel(1, lambda _kind, age: 1 / (age + 1), lambda _kind, _room: handicap)
    judged.evicted(60)
    judged.judge(1, 60)
    now = 0
    for turn in range(60):
        hot = [b"hot%d" % number for number in range(10)]
        for key in [*hot, *hot, *(b"%d-%d" % (turn, number) for number in range(55))]:
            judged.used(key, 0, now)
            now += 1
    judged.judge(now, 60)
    assert judged.order == order


def test_what_was_found_outlives_what_was_stored_later() -> None:
    made = by_find(Worth())
    for name in stored(made, "head", 10):
        made.touch(name, 10)
    stored(made, "tail", 10)
    assert [kind for kind, _ in made.candidates()] == ["tail"] * 10 + ["head"] * 10


def test_what_was_stored_again_does_not_count_as_found() -> None:
    made = by_find(Worth())
    lost = stored(made, "lost", 10)
    for name in lost:
        made.touch(name, 10)
    for name in lost:
        made.evicted(name)
    for name in stored(made, "found", 10):
        made.touch(name, 10)
    for name in lost:
        made.add(name, 10)
    assert [kind for kind, _ in made.candidates()] == ["lost"] * 10 + ["found"] * 10


def test_what_was_found_long_ago_goes_before_what_was_stored_last() -> None:
    made = by_find(Worth())
    for name in stored(made, "found", 10):
        made.touch(name, 10)
    for first in range(100, 300, 10):
        stored(made, "later", 10, first)
    assert {kind for kind, _ in list(made.candidates())[-50:]} == {"later"}


def test_tails_that_never_come_back_go_before_all_others() -> None:
    made = Worth()
    prompts = [stored(made, "prompt", 10, first) for first in range(0, 2000, 10)]
    assert not made.gives_up_tails_first
    for _ in range(2):
        for tail, *others in prompts:
            assert tail[0] == "prompt"
            for name in others:
                made.touch(name, 9)
    assert made.gives_up_tails_first
    assert list(made.candidates())[: len(prompts)] == [tail for tail, *_ in prompts]


def test_tails_that_come_back_like_others_do_not_go_first() -> None:
    made = Worth()
    prompts = [stored(made, "prompt", 10, first) for first in range(0, 2000, 10)]
    for names in prompts:
        for name in names:
            made.touch(name, 10)
    new = stored(made, "new", 1000, 5000)
    assert not made.gives_up_tails_first
    assert new[0] not in list(made.candidates())[:1]


def best_rates(chances: list[float]) -> list[float]:
    """From each age on: by trying all waits."""
    time, hits = [0.0], [0.0]
    for index, chance in enumerate(chances):
        time.append(time[-1] + width(index) * (1 - hits[-1] - chance / 2))
        hits.append(hits[-1] + chance)
    return [
        max((hits[j] - hits[i]) / (time[j] - time[i]) for j in range(i + 1, len(time)))
        for i in range(len(chances))
    ]


def lesson(
    uses: list[float], returns: list[float], passed: int = 0, now: int = 10**9
) -> tuple[list[float], list[float]]:
    """Worths and scratch space after a lesson about kinds of one size."""
    worths, scratch = [0.0] * len(returns), [0.0] * worth.SCRATCH
    worth.learn_ages(uses, returns, scratch, passed, now, 10)
    worth.learn_size(uses, returns, scratch, 0, 1)
    for kind in range(len(uses)):
        worth.learn_kind(uses, returns, worths, scratch, kind)
    return worths, scratch


def test_worths_are_the_best_rate_of_any_further_wait() -> None:
    uses, ages = [2000.0, 800.0], [0.0, 0.0, 0.0, 60.0, 20.0, 40.0, 0.0, 10.0]
    worths, _ = lesson(uses, [*ages, *(5 * count for count in ages)])
    few, of_a_size = worth.FEW, worth.FEW_OF_A_SIZE
    counts = [6 * count for count in ages]
    of_all = [count / (sum(uses) + few) for count in counts]
    both = zip(counts, of_all, strict=True)
    chances = [(n + of_a_size * chance) / (sum(uses) + of_a_size) for n, chance in both]
    expected = []
    for used, came in zip(uses, (130.0, 650.0), strict=True):
        factor = (came + few) / (used * sum(chances) + few)
        expected += best_rates([factor * chance for chance in chances])
    assert worths == pytest.approx(expected)
    assert max(worths[8:]) > max(worths[:8]) > 0


def test_few_names_that_came_back_late_say_much_when_few_can_have_come_back_yet() -> None:
    def chance_of_the_oldest(now: int) -> float:
        return lesson([2000.0], [0.0] * 7 + [10.0], now=now)[1][2 * 8 + 7]

    assert chance_of_the_oldest(now=8) > 2 * chance_of_the_oldest(now=10**9) > 0


def test_what_was_learned_counts_half_after_so_many_uses() -> None:
    uses, returns = [20.0], [0.0, 6.0]
    lesson(uses, returns, worth.HALF_LIFE * 10)
    assert (uses, returns) == ([10.0], [0.0, 3.0])


def test_setting_takes_every_policy_and_the_defaults_are_one() -> None:
    for name in POLICIES:
        assert load_settings({"eviction_policy": name}, {}).eviction_policy == name
    assert Settings().eviction_policy == DEFAULT_POLICY == ManagerSettings().eviction_policy


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_setting_refuses_what_only_the_benchmark_has_and_names_the_others(name: str) -> None:
    with pytest.raises(SettingError, match=f"{name}.* is not allowed: choose one of worth, lru"):
        load_settings({"eviction_policy": name}, {})


def test_ghosts_of_a_large_pool_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "MOST_GHOSTS", 5)
    made = Worth()
    names = [("model", bytes([number])) for number in range(40)]
    for name in names:
        made.add(name)
    for name in names[:20]:
        made.evicted(name)
    assert made.num_ghosts == 5
