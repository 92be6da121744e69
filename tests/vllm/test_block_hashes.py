from __future__ import annotations

import random
from typing import Any

import pytest

from tests.builders_vllm import ask_vllm
from vllm_ranks.engine.block_hash import event_hash, hash_prompt
from vllm_ranks.engine.text import VOCABULARY_SIZE, tokenize

pytestmark = pytest.mark.vllm


def prompt(
    tokens: list[int], block_size: int = 16, lora: tuple[str, str] | None = None, salt: str | None = None
) -> Any:
    return {"tokens": tokens, "block_size": block_size, "lora": lora, "cache_salt": salt}


def test_blocks_have_the_hashes_vllm_gives_them() -> None:
    rng = random.Random(1)
    prompts = [
        prompt([1, 2, 3, 4, 5, 6, 7, 8], 4),
        prompt(tokenize("some text in the embedded engine's own tokens " * 20)),
        prompt([0] * 64),
        prompt([rng.randrange(VOCABULARY_SIZE) for _ in range(300)], 128),
        prompt([rng.randrange(200_000) for _ in range(1_000)]),
        prompt(list(range(40)), salt="pepper"),
        prompt(list(range(40)), lora=("poet", "/adapters/poet")),
        prompt(list(range(40)), lora=("poet", "/adapters/poet"), salt="pepper"),
        prompt([7] * 15),
    ]
    for asked, answer in zip(prompts, ask_vllm("block_hashes", prompts), strict=True):
        hashes = hash_prompt(
            asked["tokens"], asked["block_size"], lora=asked["lora"], cache_salt=asked["cache_salt"]
        )
        assert [[h.hex(), event_hash(h)] for h in hashes] == answer
