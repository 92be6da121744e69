"""When an API server answers 503 instead of queueing (vLLM 0.32 AsyncLLM.check_admission)."""

from __future__ import annotations

import pytest

from vllm_ranks.engine.queue_limits import QueueLimits


def test_without_limits_everything_is_taken() -> None:
    assert QueueLimits().refusal(unfinished=10**6, queued_tokens=10**9) is None


@pytest.mark.parametrize(("unfinished", "choices", "refused"), [(3, 1, False), (4, 1, True), (3, 2, True)])
def test_each_choice_of_a_request_needs_room(unfinished: int, choices: int, refused: bool) -> None:
    reason = QueueLimits(max_num_queued_reqs=4).refusal(unfinished, 0, choices)
    assert reason == ("max_num_queued_reqs" if refused else None)


@pytest.mark.parametrize(("queued_tokens", "refused"), [(999, False), (1_000, True)])
def test_tokens_may_pass_the_limit_once_but_nothing_is_taken_beyond_it(
    queued_tokens: int, refused: bool
) -> None:
    reason = QueueLimits(max_num_queued_tokens=1_000).refusal(1, queued_tokens)
    assert reason == ("max_num_queued_tokens" if refused else None)


def test_zero_takes_nothing() -> None:
    assert QueueLimits(max_num_queued_reqs=0).refusal(0, 0) == "max_num_queued_reqs"
    assert QueueLimits(max_num_queued_tokens=0).refusal(0, 0) == "max_num_queued_tokens"
