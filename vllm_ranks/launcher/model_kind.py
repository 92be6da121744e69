"""Whether a model is a mixture of experts, read from its config.json if that is on this machine.

vLLM runs only those in external load-balancer mode. Must never download anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 4 << 20

_EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""vLLM 0.32 vllm/transformers_utils/model_arch_config_convertor.py, get_num_experts."""
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of several modalities keep the language model's part."""


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether vLLM will take a model with this config.json for a mixture of experts."""
    parts = [config, *(part for name in _TEXT_CONFIGS if isinstance(part := config.get(name), dict))]
    return any(_expert_count(part) > 0 for part in parts)


def _expert_count(config: Mapping[str, Any]) -> int:
    for name in _EXPERT_COUNTS:
        count = config.get(name)
        count = count[0] if isinstance(count, list) and count else count
        if isinstance(count, int) and count > 0:
            return count
    blocks = config.get("block_configs")
    blocks = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    counts = [block.get("n_routed_experts", 0) for block in blocks if block.get("block_type") == "moe"]
    return max((count for count in counts if isinstance(count, int)), default=0)


def find_config(model: str, environment: Mapping[str, str]) -> Path | None:
    """Where the config.json of a model is: in its folder, or in the Hugging Face cache.

    Args:
        model: what `vllm serve` is given.
        environment: of the ranks; says where the cache is.
    """
    folder = Path(model)
    if folder.is_dir():
        config = folder / "config.json"
        return config if config.is_file() else None
    repository = cache_folder(environment) / f"models--{model.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    config = repository / "snapshots" / revision / "config.json"
    return config if config.is_file() else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The Hugging Face hub's cache, found as huggingface_hub finds it (huggingface_hub/constants.py)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := environment.get(name):
            return Path(named).expanduser()
    default = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environment.get("HF_HOME") or default).expanduser() / "hub"


def read_config(path: Path) -> Mapping[str, Any] | None:
    """The content of a config.json; `None` if it is not one."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def is_mixture_of_experts(model: str, environment: Mapping[str, str]) -> bool | None:
    """Whether the model has experts; `None` if its config.json is not here."""
    path = find_config(model, environment)
    config = read_config(path) if path is not None else None
    return None if config is None else has_experts(config)
