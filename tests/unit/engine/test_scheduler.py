"""What the scheduler does, rule by rule (vLLM 0.32 vllm/v1/core/sched/scheduler.py)."""

from __future__ import annotations

import pytest

from tests.builders_engine import BLOCK, chunks, engine_request, names, scheduler, step, tokens
from vllm_ranks.engine.kv_cache import KVCache, KvEvent
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.scheduler import Scheduler, SchedulerLimits


class TestOneRequest:
    def test_its_prompt_is_computed_in_one_step_and_gives_the_first_token(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=10, output=3))
        plan, outcome = step(engine)
        assert chunks(plan) == {"a": 10}
        assert tokens(outcome) == {"a": None}

    def test_then_it_decodes_one_token_per_step_until_its_end(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=10, output=3, reason=FinishReason.STOP))
        step(engine)
        seen = []
        while engine.has_unfinished:
            plan, outcome = step(engine)
            assert (plan.prefill_tokens, plan.decode_sequences) == (0, 1)
            seen.append(tokens(outcome))
        assert seen == [{"a": None}, {"a": FinishReason.STOP}]

    def test_one_output_token_ends_with_the_prefill(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=10, output=1))
        _, outcome = step(engine)
        assert names(outcome.finished) == ["a"]
        assert not engine.has_unfinished

    def test_a_long_prompt_is_computed_in_chunks_of_the_budget(self) -> None:
        engine = scheduler(budget=16)
        engine.add(engine_request("a", prompt=40))
        assert [chunks(step(engine)[0]) for _ in range(3)] == [{"a": 16}, {"a": 16}, {"a": 8}]

    def test_a_chunk_that_does_not_end_the_prompt_gives_no_token(self) -> None:
        engine = scheduler(budget=16)
        engine.add(engine_request("a", prompt=17))
        assert tokens(step(engine)[1]) == {}
        assert tokens(step(engine)[1]) == {"a": None}

    def test_the_models_length_cuts_it_short(self) -> None:
        engine = scheduler(model_len=12)
        engine.add(engine_request("a", prompt=10, output=50, reason=FinishReason.STOP))
        step(engine)
        _, outcome = step(engine)
        assert [(s.generated_tokens, s.finish_reason) for s in outcome.finished] == [(2, FinishReason.LENGTH)]

    def test_resident_tokens_are_those_whose_kv_is_there_after_the_step(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=10, output=5))
        assert [step(engine)[0].resident_kv_tokens for _ in range(3)] == [10, 11, 12]


class TestSharingAStep:
    def test_running_requests_come_before_waiting_ones(self) -> None:
        engine = scheduler(budget=16)
        engine.add(engine_request("old", prompt=4))
        step(engine)
        engine.add(engine_request("new", prompt=40))
        plan, _ = step(engine)
        assert names(plan.decoding) == ["old"]
        assert chunks(plan) == {"new": 15}

    def test_waiting_requests_are_admitted_in_order_while_the_budget_lasts(self) -> None:
        engine = scheduler(budget=16)
        for name in "abc":
            engine.add(engine_request(name, prompt=7))
        assert chunks(step(engine)[0]) == {"a": 7, "b": 7, "c": 2}

    def test_no_more_run_than_there_are_seats(self) -> None:
        engine = scheduler(seqs=2)
        for name in "abc":
            engine.add(engine_request(name))
        step(engine)
        assert (engine.running, engine.waiting) == (2, 1)

    def test_a_seat_is_free_in_the_step_after_the_one_that_freed_it(self) -> None:
        engine = scheduler(seqs=1)
        engine.add(engine_request("a", output=1))
        engine.add(engine_request("b"))
        assert chunks(step(engine)[0]) == {"a": 4}
        assert chunks(step(engine)[0]) == {"b": 4}

    def test_the_long_prefill_threshold_bounds_each_prompts_share(self) -> None:
        engine = scheduler(budget=32, long_prefill_token_threshold=8)
        engine.add(engine_request("a", prompt=40))
        engine.add(engine_request("b", prompt=40))
        assert chunks(step(engine)[0]) == {"a": 8, "b": 8}

    def test_but_not_that_of_a_request_that_is_alone(self) -> None:
        engine = scheduler(budget=32, long_prefill_token_threshold=8)
        engine.add(engine_request("a", prompt=40))
        assert chunks(step(engine)[0]) == {"a": 32}

    def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room_for_all_of_it(self) -> None:
        engine = scheduler(budget=40, model_len=40, enable_chunked_prefill=False)
        engine.add(engine_request("a", prompt=30, output=1))
        engine.add(engine_request("b", prompt=30, output=1))
        assert chunks(step(engine)[0]) == {"a": 30}
        assert chunks(step(engine)[0]) == {"b": 30}

    def test_no_requests_is_no_step(self) -> None:
        assert scheduler().schedule() is None


class TestThrottledPrefills:
    def test_new_prompts_wait_while_others_decode(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a"))
        step(engine)
        engine.add(engine_request("b"))
        plan, _ = step(engine, throttle_prefills=True)
        assert (names(plan.decoding), chunks(plan)) == (["a"], {})

    def test_started_prompts_wait_too(self) -> None:
        engine = scheduler(budget=16)
        engine.add(engine_request("a", output=20))
        engine.add(engine_request("b", prompt=40))
        step(engine)
        plan, _ = step(engine, throttle_prefills=True)
        assert (names(plan.decoding), chunks(plan)) == (["a"], {})

    def test_nothing_waits_while_nobody_decodes(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a"))
        assert chunks(step(engine, throttle_prefills=True)[0]) == {"a": 4}

    def test_nor_when_more_waited_than_fitted_into_the_last_open_step(self) -> None:
        engine = scheduler(budget=16)
        for name in "abc":
            engine.add(engine_request(name, prompt=16, output=9))
        step(engine)
        assert chunks(step(engine, throttle_prefills=True)[0]) == {"b": 15}

    def test_a_prompt_of_which_all_but_the_last_token_is_cached_does_not_wait(self) -> None:
        engine = scheduler()
        engine.add(engine_request("first", prompt=BLOCK + 1, output=1, family="f"))
        step(engine)
        engine.add(engine_request("a"))
        step(engine)
        engine.add(engine_request("again", prompt=BLOCK + 1, family="f"))
        assert chunks(step(engine, throttle_prefills=True)[0]) == {"again": 1}


class TestPrefixCaching:
    def test_full_blocks_of_an_earlier_prompt_need_not_be_computed_again(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=2 * BLOCK + 3, output=1, family="f"))
        step(engine)
        sequence = engine.add(engine_request("b", prompt=2 * BLOCK + 3, family="f"))
        assert chunks(step(engine)[0]) == {"b": 3}
        assert sequence.cached_tokens == 2 * BLOCK
        assert (engine.prefix_cache_queries, engine.prefix_cache_hits) == (22, 8)

    def test_blocks_are_found_from_the_step_that_computes_them(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=3 * BLOCK, family="f"))
        engine.add(engine_request("b", prompt=3 * BLOCK, family="f"))
        assert chunks(step(engine)[0]) == {"a": 12, "b": 4}

    def test_the_last_token_is_always_computed(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=2 * BLOCK, output=1, family="f"))
        step(engine)
        engine.add(engine_request("b", prompt=2 * BLOCK, family="f"))
        assert chunks(step(engine)[0]) == {"b": BLOCK}

    def test_a_generated_continuation_is_found_by_the_hashes_its_rank_gave_it(self) -> None:
        cache = KVCache(16, BLOCK)
        engine = Scheduler(
            SchedulerLimits(max_model_len=64),
            cache,
            block_hasher=lambda request, index, parent: ("chat", index),
        )
        engine.add(engine_request("turn 1", prompt=BLOCK, output=BLOCK + 1, family="chat"))
        while engine.has_unfinished:
            step(engine)
        engine.add(engine_request("turn 2", prompt=3 * BLOCK, family="chat"))
        assert chunks(step(engine)[0]) == {"turn 2": BLOCK}

    def test_a_prompt_without_hashes_is_neither_found_nor_stored(self) -> None:
        events: list[KvEvent] = []
        engine = scheduler(events=events)
        for name in "ab":
            engine.add(EngineRequest(name, 0.0, 3 * BLOCK, 1))
        assert chunks(step(engine)[0]) == {"a": 12, "b": 12}
        assert events == []

    def test_switched_off_nothing_is_found_or_counted(self) -> None:
        engine = scheduler(caching=False)
        engine.add(engine_request("a", prompt=12, family="f"))
        engine.add(engine_request("b", prompt=12, family="f"))
        assert chunks(step(engine)[0]) == {"a": 12, "b": 12}
        assert engine.prefix_cache_queries == 0


class TestOutOfBlocks:
    def test_a_prompt_is_admitted_only_if_all_of_it_fits(self) -> None:
        engine = scheduler(blocks=6, budget=8)
        engine.add(engine_request("a", prompt=3 * BLOCK, output=9))
        engine.add(engine_request("b", prompt=4 * BLOCK))
        for _ in range(2):
            step(engine)
        assert (engine.running, engine.waiting) == (1, 1)

    def test_blocks_it_finds_in_use_need_not_be_free(self) -> None:
        engine = scheduler(blocks=6)
        engine.add(engine_request("a", prompt=4 * BLOCK, output=9, family="f"))
        engine.add(engine_request("b", prompt=4 * BLOCK + 1, family="f"))
        assert chunks(step(engine)[0]) == {"a": 16, "b": 1}

    def test_the_last_admitted_request_is_preempted_and_goes_to_the_front_of_the_queue(self) -> None:
        engine = scheduler(blocks=4, caching=False)
        for name in "ab":
            engine.add(engine_request(name, prompt=2 * BLOCK - 1, output=9))
        engine.add(engine_request("c"))
        step(engine)
        step(engine)
        plan, _ = step(engine)
        assert names(plan.preempted) == ["b"]
        assert names(plan.decoding) == ["a"]
        assert (engine.running, engine.waiting) == (1, 2)

    def test_nobody_is_admitted_in_a_step_that_preempts(self) -> None:
        engine = scheduler(blocks=4, caching=False)
        for name in "ab":
            engine.add(engine_request(name, prompt=2 * BLOCK - 1, output=9))
        step(engine)
        step(engine)
        engine.add(engine_request("tiny", prompt=1))
        plan, _ = step(engine)
        assert names(plan.preempted) == ["b"]
        assert plan.admitted == []

    def test_a_preempted_request_computes_prompt_and_output_again_and_goes_on_where_it_was(self) -> None:
        engine = scheduler(blocks=4, caching=False)
        for name in "ab":
            engine.add(engine_request(name, prompt=2 * BLOCK - 1, output=6))
        tokens_of_b = 0
        recomputed = {}
        while engine.has_unfinished:
            plan, outcome = step(engine)
            tokens_of_b += "b" in tokens(outcome)
            recomputed = chunks(plan) or recomputed
        assert recomputed == {"b": 2 * BLOCK - 1 + 2}
        assert tokens_of_b == 6

    def test_with_priorities_the_least_urgent_request_is_preempted_even_if_it_had_its_turn(self) -> None:
        engine = scheduler(blocks=4, caching=False, policy="priority")
        engine.add(engine_request("later", prompt=BLOCK + 1, output=9, priority=1))
        step(engine)
        engine.add(engine_request("urgent", prompt=2 * BLOCK, output=9, priority=0))
        step(engine)
        plan, _ = step(engine)
        assert names(plan.preempted) == ["later"]
        assert names(plan.decoding) == ["urgent"]

    def test_with_priorities_a_request_that_preempts_itself_ends_the_turn_of_all_behind_it(self) -> None:
        engine = scheduler(blocks=4, caching=False, policy="priority")
        engine.add(engine_request("later", prompt=2 * BLOCK - 1, output=9, priority=1))
        step(engine)
        engine.add(engine_request("urgent", prompt=2 * BLOCK - 1, output=9, priority=0))
        step(engine)
        plan, _ = step(engine)
        assert (names(plan.preempted), plan.decoding, plan.prefills) == (["later"], [], [])
        plan, _ = step(engine)
        assert names(plan.decoding) == ["urgent"]

    def test_all_blocks_are_free_when_all_requests_are_gone(self) -> None:
        engine = scheduler(blocks=5)
        for name in "abc":
            engine.add(engine_request(name, prompt=2 * BLOCK, output=10))
        while engine.has_unfinished:
            step(engine)
        assert engine.kv_cache.free_blocks == 5


class TestLoraAdapters:
    def test_no_more_of_them_run_at_once_than_the_rank_holds_and_others_pass_by(self) -> None:
        engine = scheduler(max_loras=2)
        for name, lora in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", None)):
            engine.add(engine_request(name, lora=lora))
        assert [*chunks(step(engine)[0])] == ["a", "b", "d", "e"]
        assert (engine.waiting, engine.deferred) == (1, 1)

    def test_a_request_that_was_passed_over_keeps_its_place(self) -> None:
        engine = scheduler(max_loras=1, seqs=2)
        engine.add(engine_request("a", lora="x"))
        engine.add(engine_request("b", lora="y", output=1))
        step(engine)
        engine.add(engine_request("c", lora="y", output=1))
        engine.abort(["a"])
        assert [*chunks(step(engine)[0])] == ["b", "c"]
        assert engine.deferred == 0

    def test_an_aborted_one_is_no_longer_counted(self) -> None:
        engine = scheduler(max_loras=1)
        engine.add(engine_request("a", lora="x"))
        engine.add(engine_request("b", lora="y"))
        step(engine)
        engine.abort(["b"])
        assert (engine.waiting, engine.deferred) == (0, 0)

    def test_without_a_bound_names_mean_nothing(self) -> None:
        engine = scheduler()
        for name in "abc":
            engine.add(engine_request(name, lora=name))
        assert [*chunks(step(engine)[0])] == ["a", "b", "c"]


class TestPriorities:
    def test_lower_values_are_served_first_then_earlier_arrivals(self) -> None:
        engine = scheduler(seqs=1, policy="priority")
        engine.add(engine_request("late", output=1, priority=1, arrival_s=2.0))
        engine.add(engine_request("early", output=1, priority=1, arrival_s=1.0))
        engine.add(engine_request("urgent", output=1, priority=0, arrival_s=3.0))
        assert [[*chunks(step(engine)[0])] for _ in range(3)] == [["urgent"], ["early"], ["late"]]

    def test_without_the_policy_they_mean_nothing(self) -> None:
        engine = scheduler(seqs=1)
        engine.add(engine_request("a", output=1, priority=1))
        engine.add(engine_request("b", output=1, priority=0))
        assert [[*chunks(step(engine)[0])] for _ in range(2)] == [["a"], ["b"]]


class TestAbort:
    def test_a_waiting_request_is_gone(self) -> None:
        engine = scheduler(seqs=1)
        for name in "ab":
            engine.add(engine_request(name))
        step(engine)
        assert names(engine.abort(["b"])) == ["b"]
        assert (engine.running, engine.waiting) == (1, 0)

    def test_a_running_request_gives_its_blocks_back(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", prompt=20))
        step(engine)
        [aborted] = engine.abort(["a"])
        assert (aborted.finish_reason, aborted.generated_tokens) == (FinishReason.ABORT, 1)
        assert engine.kv_cache.usage == 0
        assert not engine.has_unfinished

    def test_in_the_middle_of_a_step_it_gets_no_token_from_it(self) -> None:
        engine = scheduler()
        for name in "ab":
            engine.add(engine_request(name))
        step(engine)
        engine.add(engine_request("c"))
        plan = engine.schedule()
        assert plan is not None
        engine.abort(["a", "c"])
        assert tokens(engine.complete(plan)) == {"b": None}

    def test_unknown_and_finished_ids_are_skipped(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a", output=1))
        step(engine)
        assert engine.abort(["a", "never seen"]) == []

    def test_its_id_may_be_used_again(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a"))
        engine.abort(["a"])
        engine.add(engine_request("a"))
        assert chunks(step(engine)[0]) == {"a": 4}

    def test_a_rank_with_nothing_left_has_new_gauges_once(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a"))
        engine.abort(["a"])
        assert [engine.take_flush(), engine.take_flush()] == [True, False]


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "why"),
        [
            (EngineRequest("a", 0.0, 0, 1), "1 to 255 tokens"),
            (EngineRequest("a", 0.0, 256, 1), "1 to 255 tokens"),
            (EngineRequest("a", 0.0, 4, 0), "at least 1 token"),
            (EngineRequest("a", 0.0, 9, 1, prompt_block_hashes=("one",)), "2 full prompt blocks but 1"),
        ],
    )
    def test_a_request_that_can_never_be_served(self, request_: EngineRequest, why: str) -> None:
        engine = scheduler()
        with pytest.raises(ValueError, match=why):
            engine.add(request_)
        assert not engine.has_unfinished

    def test_an_id_in_use(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a"))
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.add(engine_request("a"))

    @pytest.mark.parametrize(
        ("limits", "why"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
            ({"max_num_batched_tokens": 100}, "must be at least max_num_seqs"),
            ({"long_prefill_token_threshold": -1}, "must lie between 0 and max_model_len"),
            ({"enable_chunked_prefill": False}, "without chunked prefill"),
            ({"prefill_schedule_interval": 0}, "prefill_schedule_interval must be at least 1"),
            ({"max_loras": 0}, "max_loras must be at least 1"),
        ],
    )
    def test_limits_under_which_requests_could_wait_forever(self, limits: dict[str, int], why: str) -> None:
        with pytest.raises(ValueError, match=why):
            SchedulerLimits(**limits)

    def test_a_kv_cache_smaller_than_one_request_of_the_models_length(self) -> None:
        with pytest.raises(ValueError, match=r"max_model_len \(17\) does not fit the KV cache of 4 blocks"):
            Scheduler(SchedulerLimits(max_model_len=17), KVCache(4, 4))

    def test_steps_out_of_turn(self) -> None:
        engine = scheduler()
        engine.add(engine_request("a"))
        plan = engine.schedule()
        assert plan is not None
        with pytest.raises(RuntimeError, match="has not been completed"):
            engine.schedule()
        engine.complete(plan)
        with pytest.raises(RuntimeError, match="scheduled last"):
            engine.complete(plan)
