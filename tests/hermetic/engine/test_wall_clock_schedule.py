"""Real processes and virtual time make the same schedule of the same arrivals.

Requests arrive shortly after given steps have ended, so the wall clock has most of a step to deliver them;
what is compared is what every rank did in every step, and what it cost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec

from tests.builders_engine import until_idle
from tests.builders_group import RankProcess, eventually, group
from tests.builders_rank_config import rank_config
from vllm_ranks.engine.block_hash import hash_prompt
from vllm_ranks.engine.plan import PlanRecord
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.scheduler import SchedulerLimits
from vllm_ranks.engine.step_trace import StepRecord
from vllm_ranks.engine.virtual import VirtualEngine
from vllm_ranks.engine.virtual_events import GroupSpec

BLOCK_SIZE = 4
OPTIONS: dict[str, Any] = {
    "step_fixed_ms": 60.0,
    "prefill_us_per_token": 200.0,
    "decode_us_per_sequence": 1_000.0,
    "kv_ns_per_token": 5_000.0,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "max_model_len": 120,
    "num_gpu_blocks": 49,
    "block_size": BLOCK_SIZE,
}
SLOW_RANK, SLOWDOWN = 1, 1.5
AFTER_STEP_S = 0.01
"""In virtual time: when requests arrive, counted from the end of a step."""
SETTLED_S = 0.02
"""On the wall clock: until every rank has begun the next step, whose end is at least 70 ms away."""


@dataclass(frozen=True)
class Arrival:
    """A request that arrives shortly after the group's n-th step."""

    after_step: int
    rank: int
    name: str
    prompt: list[int]
    tokens: int


SHARED = list(range(1_000, 1_040))
ARRIVALS = [
    Arrival(0, 0, "wake", list(range(10)), 6),
    Arrival(2, 0, "long", list(range(100, 190)), 20),  # chunked: 90 tokens with a budget of 48
    Arrival(2, 1, "shared-1", [*SHARED, 1], 8),
    Arrival(4, 0, "short", list(range(200, 205)), 12),
    Arrival(6, 1, "shared-2", [*SHARED, 2, 3], 8),  # 40 tokens from the prefix cache
    Arrival(6, 1, "other-1", list(range(300, 360)), 30),
    Arrival(8, 1, "other-2", list(range(400, 450)), 30),
    Arrival(10, 1, "other-3", list(range(500, 540)), 30),  # together more than the cache holds: preemption
    Arrival(10, 1, "other-4", list(range(600, 610)), 5),  # has to wait for a seat
    Arrival(64, 1, "again", [*SHARED, 1], 3),  # the group has gone to sleep
]


def command_line() -> list[str]:
    return [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def virtual_steps() -> list[list[tuple[float, float, PlanRecord | None]]]:
    """By rank: own cost, cost of the step, and plan, of every step."""
    config = rank_config(**OPTIONS)
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.scheduler.max_model_len,
    )
    spec = GroupSpec(
        ranks=2,
        limits=limits,
        num_blocks=config.cache.num_gpu_blocks - 1,
        block_size=BLOCK_SIZE,
        time_model=config.time_model,
        rank_time_models={SLOW_RANK: replace(config.time_model, slowdown=SLOWDOWN)},
    )
    engine = VirtualEngine([spec], trace=True)
    for arrival in ARRIVALS:
        while len(engine.steps(0)) < arrival.after_step:
            list(engine.advance_to(engine.now_s + AFTER_STEP_S))
        ended_s = 0.0
        if arrival.after_step:
            step = engine.steps(0)[arrival.after_step - 1]
            ended_s = step.start_s + step.duration_s
        request = EngineRequest(
            arrival.name,
            engine.now_s,
            len(arrival.prompt),
            arrival.tokens,
            FinishReason.LENGTH,
            prompt_block_hashes=hash_prompt(arrival.prompt, BLOCK_SIZE),
        )
        engine.submit(0, arrival.rank, request, at_s=ended_s + AFTER_STEP_S)
    list(until_idle(engine))
    return [
        [(step.ranks[rank].cost_s, step.duration_s, step.ranks[rank].plan) for step in engine.steps(0)]
        for rank in (0, 1)
    ]


def wall_clock_steps(ranks: list[RankProcess], traces: list[Path]) -> list[list[StepRecord]]:
    with ExitStack() as answers:
        for arrival in ARRIVALS:
            while traces[0].read_bytes().count(b"\n") < arrival.after_step:
                time.sleep(0.002)
            time.sleep(SETTLED_S)
            # A stream's headers come once its engine has been sent the request: arrivals keep their order.
            answers.enter_context(streaming(ranks[arrival.rank], arrival))
    assert eventually(lambda: {r.metric("embedded:data_parallel_running") for r in ranks} == {0})
    return [
        [msgspec.json.decode(line, type=StepRecord) for line in trace.read_bytes().splitlines()]
        for trace in traces
    ]


@contextmanager
def streaming(rank: RankProcess, arrival: Arrival) -> Iterator[None]:
    """A request that has been accepted; its answer is read on leaving."""
    body = {"prompt": arrival.prompt, "max_tokens": arrival.tokens, "ignore_eos": True, "stream": True}
    with closing(HTTPConnection("127.0.0.1", rank.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"X-Request-Id": arrival.name})
        response = connection.getresponse()
        assert response.status == 200
        yield
        assert response.read().endswith(b"data: [DONE]\n\n")


def named(record: PlanRecord | None) -> PlanRecord | None:
    """A plan with the names of the test instead of the ids the front end made of them."""
    if record is None:
        return None

    def name(request_id: str) -> str:
        return request_id.removeprefix("0_cmpl-").rsplit("-", 2)[0]

    return PlanRecord(
        tuple((name(request_id), tokens) for request_id, tokens in record.prefills),
        tuple(map(name, record.decodes)),
        tuple(map(name, record.preempted)),
    )


def test_a_wall_clock_group_and_a_virtual_one_make_the_same_schedule(tmp_path: Path) -> None:
    expected = virtual_steps()
    # The scenario must contain what could differ.
    plans = [plan for rank in expected for _, _, plan in rank]
    assert None in plans
    assert any(plan is not None and plan.preempted for plan in plans)

    traces = [tmp_path / f"rank{rank}" for rank in (0, 1)]
    options = [*command_line(), "--step-trace", f"{tmp_path}/rank{{rank}}"]
    with group(2, *options, rank1=("--slowdown", str(SLOWDOWN))) as ranks:
        actual = wall_clock_steps(ranks, traces)

    for rank in (0, 1):
        assert [named(step.plan) for step in actual[rank]] == [plan for _, _, plan in expected[rank]]
        assert [(step.own_cost_s, step.step_cost_s) for step in actual[rank]] == [
            (own_s, step_s) for own_s, step_s, _ in expected[rank]
        ]
