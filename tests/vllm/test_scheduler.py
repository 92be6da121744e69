"""The embedded scheduler and vLLM's own, given the same random scripts, do the same in every step."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from tests.builders_engine import tokens
from tests.builders_vllm import PROGRAMS, answer_of, running, tell, vllm_python
from vllm_ranks.engine.block_hash import event_hash, hash_block, hash_prompt
from vllm_ranks.engine.kv_cache import BlocksRemoved, BlocksStored, KVCache, KvEvent
from vllm_ranks.engine.plan import StepPlan
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.scheduler import Scheduler, SchedulerLimits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@dataclass
class Case:
    limits: SchedulerLimits
    block_size: int
    num_blocks: int
    caching: bool
    policy: Any
    script: list[list[Any]] = field(default_factory=list)


def random_case(rng: random.Random) -> Case:
    """A small rank under pressure: few blocks, few seats, a tight budget, prompts that share beginnings."""
    block_size = rng.choice([1, 2, 4, 4, 8])
    num_blocks = rng.randint(6, 40)
    max_model_len = rng.randint(2, num_blocks * block_size)
    max_num_seqs = rng.randint(1, 8)
    budget = max_num_seqs + rng.choice([0, 1, 5, 12])
    chunked = rng.random() < 0.8
    max_loras = rng.choice([None, None, 1, 2])
    if max_loras is not None:
        # With adapters, vLLM fails an assertion once a running request has had to sit out a step.
        budget = max_num_seqs * max_model_len
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        long_prefill_token_threshold=min(rng.choice([0, 0, 1, 2, 5]), max_model_len),
        enable_chunked_prefill=chunked,
        max_loras=max_loras,
    )
    case = Case(limits, block_size, num_blocks, rng.random() < 0.8, rng.choice(["fcfs", "priority"]))
    added, stepping = 0, False
    for _ in range(rng.randint(20, 120)):
        kind = rng.random()
        if kind < 0.3:
            added += 1
            family, length = rng.randint(0, 2), max(1, round(rng.random() ** 2 * (max_model_len - 1)))
            tokens = [family * 1_000 + index for index in range(length)]
            output, priority, arrival_s = rng.randint(1, 30), rng.randint(0, 2), float(rng.randint(0, 3))
            lora = None if limits.max_loras is None else rng.choice([None, 1, 2, 3])
            case.script.append(["add", f"r{added:03}", tokens, output, priority, arrival_s, lora])
        elif kind < 0.36 and added:
            case.script.append(["abort", f"r{rng.randint(1, added):03}"])
        else:
            case.script.append(
                ["complete"] if stepping else ["schedule", max_loras is None and rng.random() < 0.3]
            )
            stepping = not stepping
    return case


class Player:
    """The embedded scheduler behind the interface of the vLLM program."""

    def __init__(self, case: Case) -> None:
        self.block_size = case.block_size
        cache = KVCache(
            case.num_blocks, case.block_size, enable_prefix_caching=case.caching, listener=self.note
        )
        self.scheduler = Scheduler(case.limits, cache, case.policy, block_hasher=self.hash_generated)
        self.prompts: dict[str, list[int]] = {}
        self.events: list[list[Any]] = []
        self.plan: StepPlan | None = None

    def hash_generated(self, request: EngineRequest, block_index: int, parent_hash: Any) -> bytes:
        """As `add` numbers requests, the program numbers the tokens it makes them generate."""
        number = [*self.prompts].index(request.request_id) + 1
        tokens = self.prompts[request.request_id] + [100_000 + number * 1_000 + i for i in range(100)]
        start = block_index * self.block_size
        extra_keys = request.lora_name and (("lora", request.lora_name, "/loras"),)
        return hash_block(parent_hash, tokens[start : start + self.block_size], extra_keys or None)

    def note(self, event: KvEvent) -> None:
        match event:
            case BlocksStored(_, _, hashes, parent_hash):
                parent = None if parent_hash is None else event_hash(parent_hash)
                self.events.append(["stored", [*map(event_hash, hashes)], parent])
            case BlocksRemoved(hashes):
                self.events.append(["removed", [*map(event_hash, hashes)]])

    def add(
        self,
        request_id: str,
        prompt: list[int],
        output: int,
        priority: int,
        arrival_s: float,
        lora: int | None,
    ) -> None:
        self.prompts[request_id] = prompt
        name = None if lora is None else f"lora-{lora}"
        hashes = hash_prompt(prompt, self.block_size, lora=name and (name, "/loras"))
        self.scheduler.add(
            EngineRequest(
                request_id,
                arrival_s,
                len(prompt),
                output,
                FinishReason.LENGTH,
                priority,
                hashes,
                name,
            )
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.abort([request_id])

    def schedule(self, throttle: bool) -> dict[str, Any]:
        self.plan = self.scheduler.schedule(throttle_prefills=throttle)
        if self.plan is None:
            return {"tokens": [], "preempted": []}
        record = self.plan.record()
        tokens = [[i, n] for i, n in record.prefills] + [[i, 1] for i in record.decodes]
        return {"tokens": sorted(tokens), "preempted": sorted(record.preempted)}

    def complete(self) -> dict[str, Any]:
        events, self.events = self.events, []
        if self.plan is None:
            return {"tokens": [], "finished": [], "events": events}
        outcome = self.scheduler.complete(self.plan)
        self.plan = None
        return {
            "tokens": sorted(tokens(outcome)),
            "finished": sorted(sequence.request.request_id for sequence in outcome.finished),
            "events": events,
        }

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "deferred": scheduler.deferred,
            "usage": round(scheduler.kv_cache.usage, 6),
            "queries": scheduler.prefix_cache_queries,
            "hits": scheduler.prefix_cache_hits,
        }


def compare(case: Case, answers: list[Any]) -> tuple[int, int]:
    """Requests preempted and tokens found in the cache, to see that the case had something to show."""
    player = Player(case)
    preempted = 0
    for number, ((name, *arguments), (theirs, their_state)) in enumerate(
        zip(case.script, answers, strict=True), start=1
    ):
        ours, our_state = getattr(player, name)(*arguments), player.state()
        if name != "complete":
            # vLLM reports cache lookups when a step completes.
            for key in ("queries", "hits"):
                our_state.pop(key), their_state.pop(key)
        assert ours == theirs, f"operation {number} of {case}"
        assert our_state == their_state, f"after operation {number} of {case}"
        preempted += len(ours["preempted"]) if name == "schedule" else 0
    return preempted, player.scheduler.prefix_cache_hits


def test_random_scripts_give_the_same_steps() -> None:
    rng = random.Random(20_260)
    preempted = hits = 0
    with running([vllm_python(), str(PROGRAMS / "scheduler.py")]) as program:
        for _ in range(120):
            case = random_case(rng)
            tell(program, asdict(case))
            more_preempted, more_hits = compare(case, answer_of(program))
            preempted, hits = preempted + more_preempted, hits + more_hits
    assert preempted > 50
    assert hits > 500
