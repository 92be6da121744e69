"""The two collectives that a MoE data-parallel group needs and vLLM 0.32's CPU communicator lacks.

With data parallelism and without expert parallelism a MoE layer gathers the tokens of all ranks, computes its
share of every expert and reduces the results (vllm/distributed/device_communicators/all2all.py,
AgRsAll2AllManager). `CpuCommunicator` inherits `all_gatherv` and `reduce_scatterv`, which raise
NotImplementedError: vllm-project/vllm#57837; #47778 would add them upstream, and then this plugin goes.

Loaded by vLLM in each of its processes (entry point group `vllm.general_plugins`), possibly more than once.
Made to be right, not fast: gloo has no collectives for parts of unequal size, so the parts are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def all_gatherv(tensor: torch.Tensor, sizes: Sequence[int] | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks' tensors, in order of rank.

    Args:
        tensor: this rank's rows; all ranks agree in all dimensions but the first.
        sizes: number of rows of each rank; `None` if they are all equal.
        group: the ranks, over gloo.
    """
    own_rows = tensor.shape[0]
    sizes = [own_rows] * group.size() if sizes is None else sizes
    if len(sizes) != group.size() or sizes[group.rank()] != own_rows:
        raise ValueError(f"rank {group.rank()} of {group.size()} has {own_rows} rows, but sizes are {sizes}")
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[:own_rows] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:rows] for part, rows in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    tensor: torch.Tensor, sizes: Sequence[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks' tensors.

    Args:
        tensor: rows for all ranks, in order of rank; it is left as it is.
        sizes: number of rows that each rank gets; `None` if they all get as many.
        group: the ranks, over gloo.
    """
    rows = tensor.shape[0]
    sizes = [rows // group.size()] * group.size() if sizes is None else sizes
    if len(sizes) != group.size() or sum(sizes) != rows:
        raise ValueError(f"{rows} rows for {group.size()} ranks do not split into {sizes}")
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    first = sum(sizes[: group.rank()])
    return total[first : first + sizes[group.rank()]].clone()


def _all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """As DeviceCommunicatorBase.all_gatherv: of one tensor, or of several at once."""
    if dim != 0:
        raise NotImplementedError("all_gatherv gathers along dimension 0 alone")
    if isinstance(input_, torch.Tensor):
        return all_gatherv(input_, sizes, self.device_group)
    return [all_gatherv(tensor, sizes, self.device_group) for tensor in input_]


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """As DeviceCommunicatorBase.reduce_scatterv, along any dimension."""
    return reduce_scatterv(input_.movedim(dim, 0), sizes, self.device_group).movedim(0, dim).contiguous()


def register() -> None:
    """Give vLLM's CPU communicator what it lacks; one that has its own keeps it."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, method in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, method)
