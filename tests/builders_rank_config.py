"""Builders of the embedded engine's configuration, in the words of its command line."""

from __future__ import annotations

from typing import Any

from vllm_ranks.engine.arguments import RankArguments
from vllm_ranks.engine.config import ParallelConfig, RankConfig
from vllm_ranks.engine.derivation import create_rank_config


def rank_config(**arguments: Any) -> RankConfig:
    """What `wavegate rank` derives from these options."""
    return create_rank_config(RankArguments(**{"model": "m", **arguments}))


def parallel_config(**arguments: Any) -> ParallelConfig:
    """The data-parallel section of it."""
    return rank_config(**arguments).parallel


def external(rank: int = 0, size: int = 2, **arguments: Any) -> ParallelConfig:
    """A rank of a group in external mode."""
    return parallel_config(data_parallel_size=size, data_parallel_rank=rank, **arguments)
