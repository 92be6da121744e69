"""Hashes that name the content of KV blocks: equal to vLLM's, so that both can be compared and shared.

A block's hash covers its tokens and, through its parent's hash, everything before them (vLLM 0.32
vllm/v1/core/kv_cache_utils.py hash_block_tokens with `--prefix-caching-hash-algo sha256_cbor`). Must
never depend on the process: no seeds from the environment, no Python `hash`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import cbor2

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM derives the root from unless PYTHONHASHSEED is set."""

ExtraKey = tuple[str, ...]


def _sha256_cbor(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def root_hash(seed: str = DEFAULT_SEED) -> bytes:
    """Parent of every first block (vLLM's NONE_HASH)."""
    return _sha256_cbor(seed)


NONE_HASH = root_hash()


def hash_block(
    parent_hash: bytes | None,
    token_ids: Sequence[int],
    extra_keys: tuple[ExtraKey, ...] | None = None,
    *,
    root: bytes = NONE_HASH,
) -> bytes:
    """Hash of one full block; `parent_hash` is `None` for the first block of a prompt."""
    return _sha256_cbor((parent_hash or root, tuple(token_ids), extra_keys))


def block_extra_keys(
    block_index: int, *, lora: tuple[str, str] | None = None, cache_salt: str | None = None
) -> tuple[ExtraKey, ...] | None:
    """What besides tokens makes a block's content: the LoRA (name, path), and in the first block the salt."""
    keys: list[ExtraKey] = []
    if lora is not None:
        keys.append(("lora", *lora))
    if cache_salt and block_index == 0:
        keys.append(("cache_salt", cache_salt))
    return tuple(keys) or None


def hash_prompt(
    token_ids: Sequence[int],
    block_size: int,
    *,
    lora: tuple[str, str] | None = None,
    cache_salt: str | None = None,
    root: bytes = NONE_HASH,
) -> tuple[bytes, ...]:
    """Hashes of the full blocks of a prompt; a last block that is not full has none."""
    hashes: list[bytes] = []
    parent_hash: bytes | None = None
    for index in range(len(token_ids) // block_size):
        block = token_ids[index * block_size : (index + 1) * block_size]
        extra_keys = block_extra_keys(index, lora=lora, cache_salt=cache_salt)
        parent_hash = hash_block(parent_hash, block, extra_keys, root=root)
        hashes.append(parent_hash)
    return tuple(hashes)


def event_hash(block_hash: bytes) -> int:
    """A hash as KV events publish it: its low 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")
