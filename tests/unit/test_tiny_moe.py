"""The tiny checkpoint: always the same files, and a tokenizer that can spell anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ranks.launcher.model_kind import has_experts
from vllm_ranks.tiny_moe import WORDS, write_tiny_moe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written checkpoint."""
    return write_tiny_moe(tmp_path_factory.mktemp("checkpoint") / "new" / "folder")


def read(path: Path) -> Any:
    """One of its files."""
    return json.loads(path.read_text())


def test_the_same_files_are_written_every_time(checkpoint: Path, tmp_path: Path) -> None:
    again = write_tiny_moe(tmp_path)
    files = sorted(path.name for path in checkpoint.iterdir())
    assert files == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (again / name).read_bytes() == (checkpoint / name).read_bytes()


def test_it_is_a_mixture_of_experts_that_four_ranks_can_share(checkpoint: Path) -> None:
    config = read(checkpoint / "config.json")
    assert has_experts(config)
    assert config["moe_intermediate_size"] % (4 * 32) == 0


def test_every_token_of_the_vocabulary_has_weights(checkpoint: Path) -> None:
    vocabulary = read(checkpoint / "tokenizer.json")["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert read(checkpoint / "config.json")["vocab_size"] == len(vocabulary)


def test_every_byte_is_a_token_so_any_text_can_be_spelled(checkpoint: Path) -> None:
    vocabulary = read(checkpoint / "tokenizer.json")["model"]["vocab"]
    single = [token for token, number in vocabulary.items() if number < 256]
    assert len(single) == 256
    assert all(len(token) == 1 for token in single)


def test_the_merges_lead_from_bytes_to_every_word(checkpoint: Path) -> None:
    model = read(checkpoint / "tokenizer.json")["model"]
    vocabulary, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    for word in WORDS.split():
        merged = "Ġ"
        for letter in word:
            assert (merged, letter) in merges
            merged += letter
        assert merged in vocabulary


def test_no_token_ends_an_answer_early(checkpoint: Path) -> None:
    assert read(checkpoint / "config.json")["eos_token_id"] is None
    assert "eos_token" not in read(checkpoint / "tokenizer_config.json")
