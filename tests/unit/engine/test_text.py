from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ranks.engine.text import (
    NATURAL_MAX_TOKENS,
    VOCABULARY_SIZE,
    IncrementalDetokenizer,
    Prose,
    chat_prompt,
    detokenize,
    token_bytes,
    tokenize,
)

texts = st.text(st.characters(exclude_categories=("Cs",)))


@given(texts)
def test_detokenizing_is_the_inverse_of_tokenizing(text: str) -> None:
    assert detokenize(tokenize(text)) == text


@given(st.integers(0, VOCABULARY_SIZE - 1))
def test_every_token_id_stands_for_one_to_four_bytes(token: int) -> None:
    assert 1 <= len(token_bytes(token)) <= 4


@pytest.mark.parametrize("token", [-1, VOCABULARY_SIZE])
def test_an_id_out_of_vocabulary_is_an_error(token: int) -> None:
    with pytest.raises(ValueError, match="out of vocabulary"):
        token_bytes(token)


def test_four_characters_of_english_are_a_token() -> None:
    assert len(tokenize("a" * 400)) == 100


@given(texts, texts)
def test_equal_beginnings_give_equal_tokens(beginning: str, end: str) -> None:
    whole = len(beginning.encode()) // 4
    assert tokenize(beginning + end)[:whole] == tokenize(beginning)[:whole]


@given(texts)
def test_text_that_arrives_token_by_token_is_never_broken(text: str) -> None:
    tokens = tokenize(text)
    decoder = IncrementalDetokenizer()
    pieces = [decoder.add([token], index == len(tokens) - 1) for index, token in enumerate(tokens)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_cut_off_at_the_end_becomes_the_replacement_character() -> None:
    decoder = IncrementalDetokenizer()
    assert decoder.add([tokenize("abc🌊")[0]], final=True) == "abc\ufffd"


def test_the_same_prompt_and_seed_give_the_same_words() -> None:
    prompt = tokenize("tell me something")
    first, second = Prose(prompt, 7), Prose(prompt, 7)
    assert [first.next_token() for _ in range(50)] == [second.next_token() for _ in range(50)]
    assert first.natural_length == second.natural_length


@pytest.mark.parametrize(("prompt", "seed"), [("tell me something", 8), ("tell me more", 7)])
def test_another_seed_or_prompt_gives_other_words(prompt: str, seed: int) -> None:
    original, other = Prose(tokenize("tell me something"), 7), Prose(tokenize(prompt), seed)
    assert [original.next_token() for _ in range(20)] != [other.next_token() for _ in range(20)]


def test_natural_lengths_vary_within_bounds() -> None:
    lengths = {Prose([index], 0).natural_length for index in range(500)}
    assert len(lengths) > 50
    assert min(lengths) >= 1
    assert max(lengths) <= NATURAL_MAX_TOKENS


def test_a_reply_sent_back_as_a_message_has_the_tokens_it_was_generated_with() -> None:
    question = [("user", "what is a wave?")]
    prompt = chat_prompt(question)
    prose = Prose(prompt, 0)
    reply = [prose.next_token() for _ in range(40)]
    continued = chat_prompt([*question, ("assistant", detokenize(reply)), ("user", "and then?")])
    assert continued[: len(prompt) + len(reply)] == [*prompt, *reply]
