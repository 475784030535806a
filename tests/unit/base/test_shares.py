"""Who gives something up where tenants share, compared with one piece after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raykv.base.shares import Share, Shareholder, shareholder, to_give_up


@st.composite
def holders(draw: st.DrawFn) -> list[Shareholder[int]]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        guaranteed = draw(st.integers(0, 40))
        most = draw(st.integers(guaranteed, 60))
        pieces = draw(st.integers(0, 12))
        found.append(Shareholder(number, draw(st.integers(0, 80)), guaranteed, most, pieces))
    return found


def one_by_one(
    left: list[Shareholder[int]], piece: int, count: int, *, may_go_below: bool
) -> dict[int, int]:
    """The rule in plain words."""
    parts: dict[int, int] = {}
    for _ in range(count):
        able = [each for each in left if each.num_left]
        over = [each for each in able if each.used > each.most]
        lent = [each for each in able if each.used - piece >= each.guaranteed]
        rest = able if may_go_below else []
        if over:
            first = max(over, key=lambda each: each.used - each.most)
        elif lent or rest:
            first = max(lent or rest, key=lambda each: each.used - each.guaranteed)
        else:
            break
        parts[first.holder] = parts.get(first.holder, 0) + 1
        first.used -= piece
        first.num_left -= 1
    return parts


def copied(some: list[Shareholder[int]]) -> list[Shareholder[int]]:
    return [Shareholder(h.holder, h.used, h.guaranteed, h.most, h.num_left) for h in some]


@given(some=holders(), piece=st.integers(1, 7), count=st.integers(0, 30), below=st.booleans())
def test_parts_are_those_of_one_piece_after_the_other(
    some: list[Shareholder[int]], piece: int, count: int, below: bool
) -> None:
    expected = one_by_one(copied(some), piece, count, may_go_below=below)
    assert to_give_up(some, piece, count, may_go_below=below) == expected


def test_shares_are_parts_of_the_whole() -> None:
    made = shareholder("a", 5, Share(0.25, 0.5), 101, 3)
    assert (made.guaranteed, made.most) == (25, 50)
