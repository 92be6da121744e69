"""A group of real vLLM ranks that serves a tiny checkpoint on the CPU, as demo and tests run it. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENVIRONMENT = {
    # vLLM binds threads by the rank within the machine: 0 for every external rank, so that all share a core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

ARGUMENTS = (
    # Weights that are made up: the text means nothing.
    "--load-format=dummy",
    # vLLM cannot compile MoE models for data-parallel ranks on a CPU (vllm-project/vllm#31648).
    "--enforce-eager",
    # Without a size each rank takes a share of the whole memory, and the second finds too little left.
    "--kv-cache-memory-bytes=64M",
    "--max-model-len=16384",
    "--max-num-seqs=64",
)


def cpu_group(*, name: str, model: str, checkpoint: Path, executable: str) -> dict[str, Any]:
    """The section of the configuration, without size and ports.

    Args:
        name: of the group.
        model: what clients ask for.
        checkpoint: folder that `vllm_ranks.tiny_moe` has written.
        executable: the `vllm` command of the environment with vLLM's CPU build.
    """
    return {
        "engine": "vllm",
        "name": name,
        "model": model,
        "model_path": str(checkpoint),
        "devices": [],
        "executable": executable,
        "args": list(ARGUMENTS),
        "env": dict(ENVIRONMENT),
    }
