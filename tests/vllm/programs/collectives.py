"""Runs the collectives of the CPU plugin as vLLM would call them, on real processes over gloo.

Question: [{"gather" or "scatter": [rows of each rank, each of three numbers], "sizes": [...] or null}, ...].
Answer: for each of them the results of each rank.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from wavegate_cpu_collectives import register


def gather(communicator: Any, rows: torch.Tensor, sizes: list[int] | None) -> dict[str, Any]:
    """One tensor, and two at once."""
    alone = CpuCommunicator.all_gatherv(communicator, rows, sizes=sizes)
    first, second = CpuCommunicator.all_gatherv(communicator, [rows, rows * 2], dim=0, sizes=sizes)
    return {"alone": alone.tolist(), "first": first.tolist(), "second": second.tolist()}


def scatter(communicator: Any, rows: torch.Tensor, sizes: list[int] | None) -> dict[str, Any]:
    """Along the first dimension and along the last."""
    before = rows.clone()
    along_rows = CpuCommunicator.reduce_scatterv(communicator, rows, 0, sizes)
    along_columns = CpuCommunicator.reduce_scatterv(communicator, rows.t().contiguous(), -1, sizes)
    return {
        "along_rows": along_rows.tolist(),
        "along_columns": along_columns.t().tolist(),
        "input_is_unchanged": torch.equal(rows, before),
    }


def run_rank(rank: int, world_size: int, port: int, questions: list[dict[str, Any]], answers: Any) -> None:
    """One rank's part."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    communicator = SimpleNamespace(device_group=dist.group.WORLD)
    results = []
    for question in questions:
        call = gather if "gather" in question else scatter
        inputs = question.get("gather") or question["scatter"]
        rows = torch.tensor(inputs[rank], dtype=torch.bfloat16).reshape(-1, 3)
        results.append(call(communicator, rows, question["sizes"]))
    answers.put((rank, results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Ask all ranks, print what they answered in order."""
    register()
    questions = json.loads(sys.stdin.readline())
    world_size = len(questions[0].get("gather") or questions[0]["scatter"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forking = multiprocessing.get_context("fork")
    answers = forking.SimpleQueue()
    ranks = [
        forking.Process(target=run_rank, args=(rank, world_size, port, questions, answers), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    by_rank = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join()
    by_question = zip(*(by_rank[rank] for rank in range(world_size)), strict=True)
    print("ANSWER " + json.dumps([list(results) for results in by_question]), flush=True)


if __name__ == "__main__":
    main()
