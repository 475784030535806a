"""What bodies begin with: equal as far as they are, however long, and never across models."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from raykv.serve.http.exchange import MESSAGES, RESPONSES
from raykv.serve.router.trail import BYTES_PER_TOKEN, PARTS, read_trail, stretches


def body(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": each} for each in contents]
    return json.dumps({"model": "m", **fields, "messages": messages, "stream": True}).encode()


def shared(one: bytes, other: bytes) -> int:
    pairs = zip(read_trail(one).digests, read_trail(other).digests, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(read_trail(one).digests))


def test_next_turn_has_the_trail_of_the_one_before() -> None:
    first, second = "a" * 5000, "b" * 3000
    before = read_trail(body(first))
    known = shared(body(first), body(first, second))
    assert before.unknown(known) < before.num_tokens / PARTS + 64


def test_text_that_differs_shares_what_comes_before() -> None:
    assert shared(body("a" * 5000), body("a" * 2500 + "c" * 2500)) == 2500 // 256
    assert shared(body("a" * 5000), body("c" * 5000)) == 0


def test_fields_around_the_messages_do_not_matter_but_for_the_model_and_the_salt() -> None:
    text = "a" * 5000
    assert shared(body(text), body(text, max_tokens=7)) == len(read_trail(body(text)).digests)
    assert shared(body(text), body(text).replace(b'"m"', b'"n"')) == 0
    salted = body(text).replace(b'"stream": true', b'"cache_salt": "x"')
    assert shared(body(text), salted) == 0


def test_agents_turn_has_the_trail_of_the_one_before_whatever_its_bill_says() -> None:
    said = [{"role": "user", "content": "a" * 5000}]
    more = [*said, {"role": "assistant", "content": "b" * 500}]

    def asked(bill: str, messages: list[dict[str, str]]) -> bytes:
        billed = {"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={bill};"}
        system = [billed, {"type": "text", "text": "s" * 800}]
        return json.dumps({"model": "m", "system": system, "messages": messages}).encode()

    one, other = (
        read_trail(asked(bill, messages), MESSAGES)
        for bill, messages in (("0f3", said), ("1e4a", more))
    )
    assert len(one.digests) - 1 <= len({*one.digests} & {*other.digests})
    assert one.num_tokens * BYTES_PER_TOKEN > 5800


def test_trail_of_a_response_begins_with_what_is_asked() -> None:
    def asked(effort: str) -> bytes:
        body = {"model": "m", "reasoning": {"effort": effort}, "instructions": "i" * 600}
        return json.dumps({**body, "input": "a" * 5000}).encode()

    one, other = (read_trail(asked(effort), RESPONSES).digests for effort in ("low", "high"))
    assert one == other
    assert len(one) > 16


def test_model_that_a_text_speaks_of_is_none() -> None:
    one, other = ('say "model": "x"' + "a" * 3000, 'say "model": "x"' + "a" * 2500)
    assert shared(body(one), body(other)) > 8


def test_body_that_is_no_json_has_a_trail_too() -> None:
    assert read_trail(b"").digests == []
    assert len(read_trail(b"x" * 600).digests) == 2


@given(st.integers(0, 1 << 22))
def test_stretches_follow_each_other_and_are_few(num_bytes: int) -> None:
    found = stretches(num_bytes)
    assert [end for _, end in found[:-1]] == [begin for begin, _ in found[1:]]
    assert len(found) <= 2 * PARTS + PARTS * max(0, num_bytes.bit_length() - 12)
    assert all(end - begin <= max(256, begin / PARTS) for begin, end in found)
    if found:
        assert num_bytes - found[-1][1] <= max(256, found[-1][1] / PARTS)
        assert read_trail(b"x" * min(num_bytes, 9000)).num_tokens <= num_bytes / BYTES_PER_TOKEN
