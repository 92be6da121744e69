"""Prompts that begin alike have the same first block hashes, whatever carries them, and others do not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ext_proc.facts import BLOCK_TOKENS, read_facts
from ext_proc.prompt_blocks import BYTES_PER_TOKEN, MAX_BLOCKS, MAX_PARTS, block_hashes, canonical_prompt

BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
SYSTEM = {"role": "system", "content": "You are terse. " * 60}


def blocks_of(path: str = "/v1/chat/completions", **body: Any) -> tuple[int, ...]:
    return read_facts(path, json.dumps({"model": "m", **body}).encode(), "r").prompt_blocks


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_goes_on_from_the_blocks_it_had() -> None:
    first = blocks_of(messages=[SYSTEM, user("Hello? " * 100)])
    second = blocks_of(
        messages=[SYSTEM, user("Hello? " * 100), {"role": "assistant", "content": "Hi."}, user("And? " * 100)]
    )
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_requests_that_share_a_system_prompt_share_its_blocks() -> None:
    one = blocks_of(messages=[SYSTEM, user("alpha " * 100)])
    other = blocks_of(messages=[SYSTEM, user("omega " * 100)])
    assert common(one, other) == len(SYSTEM["content"]) // BLOCK_BYTES


def test_only_full_blocks_count() -> None:
    assert blocks_of("/v1/completions", prompt="x" * (BLOCK_BYTES - 1)) == ()
    assert len(blocks_of("/v1/completions", prompt="x" * (3 * BLOCK_BYTES + 1))) == 3


def test_another_model_salt_role_or_tool_shares_nothing() -> None:
    plain = blocks_of(messages=[SYSTEM])
    for changed in (
        blocks_of(model="n", messages=[SYSTEM]),
        blocks_of(cache_salt="tenant", messages=[SYSTEM]),
        blocks_of(messages=[{**SYSTEM, "role": "user"}]),
        blocks_of(messages=[SYSTEM], tools=[{"type": "function", "function": {"name": "f"}}]),
    ):
        assert common(plain, changed) == 0


def test_token_ids_are_blocks_too() -> None:
    ids = list(range(3 * BLOCK_TOKENS))
    one = blocks_of("/v1/completions", prompt=ids)
    other = blocks_of(
        "/v1/completions", prompt=[*ids[: 2 * BLOCK_TOKENS], *reversed(ids[2 * BLOCK_TOKENS :])]
    )
    assert (len(one), common(one, other)) == (3, 2)


def test_text_may_be_sent_as_typed_parts() -> None:
    parts = [{"type": "text", "text": SYSTEM["content"]}]
    assert blocks_of(messages=[{**SYSTEM, "content": parts}]) == blocks_of(messages=[SYSTEM])


def test_images_count_by_what_they_refer_to() -> None:
    def with_image(url: str) -> tuple[int, ...]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return blocks_of(messages=[{"role": "user", "content": [image, {"type": "text", "text": "x" * 999}]}])

    assert with_image("http://a/1.png") == with_image("http://a/1.png")
    assert common(with_image("http://a/1.png"), with_image("http://a/2.png")) == 0


def test_how_a_prompt_is_nested_makes_no_difference() -> None:
    text = ["one " * 100, "two " * 100, "three " * 100]
    flat = blocks_of("/v1/completions", prompt=text)
    assert blocks_of("/v1/completions", prompt=[[text[0], [[text[1]]]], [[text[2]]]]) == flat


def test_of_a_prompt_in_countless_parts_the_first_ones_are_looked_at() -> None:
    most = blocks_of("/v1/completions", prompt=["text"] * MAX_PARTS)
    assert len(most) > 0
    assert blocks_of("/v1/completions", prompt=["text"] * 2 * MAX_PARTS) == most


def test_no_more_of_a_prompt_is_put_together_than_is_hashed() -> None:
    parts = ["x" * 100, "é" * 100, list(range(100)), [{"role": "user", "content": "y" * 100}]]
    whole = canonical_prompt(b"tools", parts, 10_000)
    for most in range(len(whole) + 1):
        assert canonical_prompt(b"tools", parts, most) == whole[:most]


def test_an_endless_prompt_is_hashed_up_to_a_bound() -> None:
    assert len(block_hashes("m", b"x" * (4 * 16 * (MAX_BLOCKS + 10)), 16)) == MAX_BLOCKS


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.binary(max_size=2000))
def test_hashes_agree_exactly_as_far_as_whole_blocks_do(start: bytes, one: bytes, other: bytes) -> None:
    agreed = common(tuple(start + one), tuple(start + other)) // 64
    got = common(block_hashes("m", start + one, 16), block_hashes("m", start + other, 16))
    assert got == min(agreed, len(start + one) // 64, len(start + other) // 64)


@given(st.text())
def test_block_hashes_are_small_integers(prompt: str) -> None:
    assert all(0 <= block < 1 << 60 for block in blocks_of("/v1/completions", prompt=prompt * 50))
