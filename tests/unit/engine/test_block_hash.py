"""Block hashes equal vLLM's (vectors computed with vLLM 0.32, no PYTHONHASHSEED, sha256_cbor)."""

from __future__ import annotations

from vllm_ranks.engine.block_hash import (
    NONE_HASH,
    block_extra_keys,
    event_hash,
    hash_block,
    hash_prompt,
    root_hash,
)

FIRST = "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"
CHILD = "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1"


def test_root_is_vllms_none_hash() -> None:
    assert NONE_HASH.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


def test_first_block_and_child_equal_vllms_vectors() -> None:
    first = hash_block(None, (1, 2, 3, 4))
    assert first.hex() == FIRST
    assert hash_block(first, [5, 6, 7, 8]).hex() == CHILD


def test_a_prompt_is_the_chain_of_its_full_blocks() -> None:
    assert [h.hex() for h in hash_prompt([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)] == [FIRST, CHILD]
    assert hash_prompt([1, 2, 3], 4) == ()


def test_events_carry_the_low_64_bits() -> None:
    assert event_hash(bytes.fromhex(FIRST)) == 9561501211280363793
    assert event_hash(bytes.fromhex(CHILD)) == 15292913576410714033


def test_equal_blocks_after_different_beginnings_differ() -> None:
    one = hash_prompt([1, 2, 7, 7], 2)
    other = hash_prompt([1, 3, 7, 7], 2)
    assert one[1] != other[1]


def test_a_salt_separates_whole_prompts_through_their_first_block() -> None:
    assert block_extra_keys(0, cache_salt="tenant") == (("cache_salt", "tenant"),)
    assert block_extra_keys(1, cache_salt="tenant") is None
    plain, salted = hash_prompt(range(8), 4), hash_prompt(range(8), 4, cache_salt="tenant")
    assert plain[0] != salted[0]
    assert plain[1] != salted[1]


def test_a_lora_separates_every_block() -> None:
    assert block_extra_keys(3, lora=("poet", "/loras/poet")) == (("lora", "poet", "/loras/poet"),)
    assert hash_prompt(range(4), 4, lora=("poet", "/a")) != hash_prompt(range(4), 4, lora=("poet", "/b"))


def test_another_seed_is_another_root_and_other_hashes() -> None:
    assert hash_prompt(range(4), 4, root=root_hash("0")) != hash_prompt(range(4), 4)
