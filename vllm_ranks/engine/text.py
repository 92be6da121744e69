"""Text of the embedded engine: a reversible toy tokenizer and deterministic prose.

A token is one to four bytes of UTF-8, so about four characters of English; its id *is* its bytes, so
`/tokenize` and `/detokenize` are exact inverses for every string. Text is cut every four bytes from the
start of each part of a prompt, so equal beginnings give equal tokens (and equal KV blocks), and a reply
sent back as a chat message is cut where it was generated. Must never depend on time or the process.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import random
import struct
from collections.abc import Iterable, Iterator, Sequence

BYTES_PER_TOKEN = 4
_OFFSETS = {4: 0, 3: 1 << 32, 2: (1 << 32) + (1 << 24), 1: (1 << 32) + (1 << 24) + (1 << 16)}
VOCABULARY_SIZE = _OFFSETS[1] + (1 << 8)

NATURAL_MEDIAN_TOKENS = 96
NATURAL_SPREAD = 0.7
NATURAL_MAX_TOKENS = 1_024

_VOCABULARY = (
    "the a of and in to that with from over under between while because until after before light water "
    "river stone forest wave ocean wind quiet slow bright early distant northern patient careful steady "
    "moves carries follows answers measures gathers returns begins settles turns holds reaches remembers "
    "morning harbour lantern window market garden valley engine signal balance pattern rhythm question "
    "naïve café façade señor Zürich smörgåsbord crème déjà-vu tide → ∞ 東京 🌊"
)
_WORDS = tuple(_VOCABULARY.split())
_ENDINGS = (".", ".", ".", "!", "?", ";")


def tokenize(text: str) -> list[int]:
    """Token ids of one piece of text."""
    data = text.encode("utf-8", "surrogatepass")
    whole = len(data) // BYTES_PER_TOKEN
    # Four-byte ids have offset 0: the bytes themselves, read as big-endian integers.
    ids = list(struct.unpack(f">{whole}I", data[: whole * BYTES_PER_TOKEN]))
    if rest := data[whole * BYTES_PER_TOKEN :]:
        ids.append(_OFFSETS[len(rest)] + int.from_bytes(rest))
    return ids


def token_bytes(token: int) -> bytes:
    """The bytes of a token.

    Raises:
        ValueError: no such token.
    """
    if not 0 <= token < VOCABULARY_SIZE:
        raise ValueError(f"token id {token} is out of vocabulary: ids are 0 to {VOCABULARY_SIZE - 1}")
    for length, offset in _OFFSETS.items():
        if token < offset + (1 << 8 * length):
            return (token - offset).to_bytes(length)
    raise AssertionError("the offsets cover the vocabulary")


def detokenize(tokens: Iterable[int]) -> str:
    """Inverse of `tokenize`; bytes that are no UTF-8 become U+FFFD.

    Raises:
        ValueError: a token is out of vocabulary.
    """
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens; a character cut between two tokens appears with the second."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int], final: bool) -> str:
        """The new text; `final`: nothing follows, so an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"".join(map(token_bytes, tokens)), final)


class Prose:
    """What the engine "generates" for one sequence: the same prompt and seed always give the same words."""

    __slots__ = ("_pieces", "natural_length")

    def __init__(self, prompt_tokens: Sequence[int], seed: int) -> None:
        """`seed`: the request's seed plus the index of the choice."""
        digest = hashlib.sha256(seed.to_bytes(16, "big", signed=True))
        digest.update(struct.pack(f">{len(prompt_tokens)}Q", *prompt_tokens))
        rng = random.Random(digest.digest())
        length = NATURAL_MEDIAN_TOKENS * rng.lognormvariate(0.0, NATURAL_SPREAD)
        self.natural_length = max(1, min(NATURAL_MAX_TOKENS, round(length)))
        """Tokens after which the sequence would end by itself."""
        self._pieces = _four_bytes(_sentences(rng))

    def next_token(self) -> int:
        """The next token; endless."""
        return next(self._pieces)


def _sentences(rng: random.Random) -> Iterator[bytes]:
    separator = ""
    while True:
        words = rng.choices(_WORDS, k=rng.randint(5, 14))
        words[0] = words[0].capitalize()
        yield f"{separator}{' '.join(words)}{rng.choice(_ENDINGS)}".encode()
        separator = " "


def _four_bytes(parts: Iterator[bytes]) -> Iterator[int]:
    pending = b""
    for part in parts:
        pending += part
        whole = len(pending) // BYTES_PER_TOKEN
        yield from struct.unpack_from(f">{whole}I", pending)
        pending = pending[whole * BYTES_PER_TOKEN :]


def chat_prompt(messages: Iterable[tuple[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Tokens of a conversation of (role, content).

    The template: `<|role|>\\ncontent<|end|>\\n` per message, then `<|assistant|>\\n`. Each of these parts
    is tokenized by itself, so a message has the same tokens wherever it stands.
    """
    parts = [tokenize(part) for role, content in messages for part in (f"<|{role}|>\n", content, "<|end|>\n")]
    if add_generation_prompt:
        parts.append(tokenize("<|assistant|>\n"))
    return list(itertools.chain.from_iterable(parts))
