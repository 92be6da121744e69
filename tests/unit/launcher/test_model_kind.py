"""Whether a model has experts, and where its config.json is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ranks.launcher.model_kind import cache_folder, has_experts, is_mixture_of_experts
from vllm_ranks.tiny_moe import write_tiny_moe


def write(path: Path, config: Any) -> None:
    """A config.json."""
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 128},
        {"n_routed_experts": 256},
        {"num_local_experts": 8},
        {"moe_num_experts": [64, 64]},
        {"text_config": {"num_experts": 16}},
        {"block_configs": [{"block_type": "mamba"}, {"block_type": "moe", "n_routed_experts": 4}]},
    ],
)
def test_models_with_experts_are_mixtures(config: dict[str, Any]) -> None:
    assert has_experts(config)


@pytest.mark.parametrize(
    "config",
    [{}, {"num_experts": 0}, {"num_experts": None}, {"num_attention_heads": 32}, {"text_config": {}}],
)
def test_models_without_are_dense(config: dict[str, Any]) -> None:
    assert not has_experts(config)


def test_a_folder_is_read_directly(tmp_path: Path) -> None:
    assert is_mixture_of_experts(str(write_tiny_moe(tmp_path / "tiny")), {}) is True


def test_a_name_on_the_hub_is_looked_up_in_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--dense"
    write(repository / "snapshots" / "abc" / "config.json", {"hidden_size": 1})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert is_mixture_of_experts("org/dense", {"HF_HOME": str(tmp_path)}) is False


def test_what_is_not_here_is_not_guessed(tmp_path: Path) -> None:
    assert is_mixture_of_experts("org/model", {"HF_HOME": str(tmp_path)}) is None
    assert is_mixture_of_experts(str(tmp_path), {}) is None


def test_a_broken_config_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert is_mixture_of_experts(str(tmp_path), {}) is None


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environment: dict[str, str], folder: str) -> None:
    assert str(cache_folder(environment)) == folder
