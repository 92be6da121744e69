"""Writes a tiny Qwen3-MoE checkpoint that vLLM serves on a CPU: configuration and tokenizer, no weights.

    python -m vllm_ranks.tiny_moe FOLDER
    vllm serve FOLDER --load-format dummy …

`--load-format dummy` makes up the weights, so the text it writes means nothing; everything around it (lock
step, waves, KV cache, metrics, failures) is real. Downloads nothing; writes the same files every time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_POSITIONS = 32_768

WORDS = (
    "a about after again all an and answer any are as at balance batch be been but by cache call can chat "
    "client coming continue could day decode do down each end engine every few find first follow for from "
    "gate gave get give go good great group had has have he her here him his how i if in into is it its just "
    "know last less like line little long made make many may me model more most much must my name never new "
    "no not now number of old on one only or other our out over part people pick place point prefill prompt "
    "queue rank report request right said same say see send she should slow small so some state step such "
    "take tell text than that the their them then there these they thing think this time to token turn two "
    "up us use very wait was water wave way we well went were what when where which while who will with word "
    "work would write year you your"
)
"""Each is one token, with the space before it; other text is spelled out in bytes."""

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool | tojson + '\n' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def write_tiny_moe(folder: Path) -> Path:
    """Write the checkpoint into `folder`, which is created if need be, and return its absolute path."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, merges = _vocabulary(WORDS.split())
    files = {
        "config.json": _config(vocabulary),
        "tokenizer.json": _tokenizer(vocabulary, merges),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "pad_token": END_OF_TEXT,
            "model_max_length": MAX_POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    return folder.resolve()


def _config(vocabulary: dict[str, int]) -> dict[str, Any]:
    """Sizes that vLLM's CPU kernels for MoE layers accept, shared among up to four ranks."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": len(vocabulary),
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        # Made-up weights would end answers at random, some before their first word.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": vocabulary[END_OF_TEXT],
        "torch_dtype": "bfloat16",
    }


def _vocabulary(words: Iterable[str]) -> tuple[dict[str, int], list[list[str]]]:
    """Tokens with their ids, and the merges of a byte-level BPE that makes each word one token."""
    symbols = _byte_symbols()
    vocabulary = {symbol: token for token, symbol in enumerate(symbols)}
    merges: list[list[str]] = []
    for word in words:
        merged, *rest = (symbols[byte] for byte in f" {word}".encode())
        for symbol in rest:
            longer = merged + symbol
            if longer not in vocabulary:
                vocabulary[longer] = len(vocabulary)
                merges.append([merged, symbol])
            merged = longer
    for special in (END_OF_TEXT, TURN_START, TURN_END):
        vocabulary[special] = len(vocabulary)
    return vocabulary, merges


def _byte_symbols() -> list[str]:
    """The character that stands for each byte: itself if it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[token], "content": token, **special}
            for token in (END_OF_TEXT, TURN_START, TURN_END)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m vllm_ranks.tiny_moe FOLDER")
    print(write_tiny_moe(Path(sys.argv[1])))
