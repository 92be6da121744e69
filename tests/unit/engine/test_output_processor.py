from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ranks.engine import wire
from vllm_ranks.engine.metrics import IterationStats
from vllm_ranks.engine.output_processor import (
    Collector,
    Delta,
    GenerationError,
    OutputProcessor,
    Parent,
    SequenceRequest,
)
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.text import tokenize

ARRIVAL_S = 100.0


class Feed:
    """One request and the outputs an engine sends for it."""

    def __init__(
        self, *, stop: list[str] | None = None, min_tokens: int = 0, include_stop: bool = False
    ) -> None:
        self.processor = OutputProcessor()
        self.collector = Collector(1)
        self.aborted: list[str] = []
        self.stats = IterationStats()
        self.processor.add(
            SequenceRequest(
                request_id="r",
                choice=0,
                collector=self.collector,
                prompt_tokens=10,
                max_tokens=100,
                parent=Parent(1, 1),
                arrival_s=ARRIVAL_S,
                stop=stop or [],
                include_stop_in_output=include_stop,
                min_tokens=min_tokens,
                lora_name=None,
            )
        )

    def step(
        self,
        text: str,
        *,
        finish: FinishReason | None = None,
        engine_s: float = 1.0,
        now_s: float = ARRIVAL_S + 1,
        events: list[wire.EngineEvent] | None = None,
        prefill: wire.PrefillStats | None = None,
    ) -> None:
        output = wire.EngineCoreOutput(
            "r", tokenize(text), finish_reason=finish, events=events, prefill_stats=prefill
        )
        stats, aborted = self.processor.process(
            wire.EngineCoreOutputs(outputs=[output], timestamp=engine_s), now_s
        )
        self.aborted += aborted
        if stats is not None:
            self.stats = stats

    async def deltas(self) -> list[Delta]:
        return await self.collector.get()

    async def text(self) -> str:
        return "".join(delta.text for delta in await self.deltas())


async def test_text_is_handed_over_as_it_is_generated() -> None:
    feed = Feed()
    feed.step("wave")
    assert await feed.text() == "wave"
    feed.step("gate", finish=FinishReason.STOP)
    (delta,) = await feed.deltas()
    assert (delta.text, delta.finish_reason, delta.token_count) == ("gate", FinishReason.STOP, 1)
    assert feed.collector.unfinished == 0
    assert feed.processor.unfinished == 0


async def test_a_stop_string_over_several_tokens_is_found_and_left_out() -> None:
    feed = Feed(stop=["END HERE"])
    for piece in ("some", " tex", "t EN", "D HE", "RE a", "nd m"):
        feed.step(piece)
    deltas = await feed.deltas()
    assert "".join(delta.text for delta in deltas) == "some text "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "END HERE")
    assert feed.aborted == ["r"]


async def test_a_stop_string_is_kept_if_asked_for() -> None:
    feed = Feed(stop=["END"], include_stop=True)
    feed.step("the END of it")
    assert await feed.text() == "the END"


async def test_text_that_may_begin_a_stop_string_is_held_back_and_released_at_the_end() -> None:
    feed = Feed(stop=["abcdef"])
    feed.step("xyzabc")
    assert await feed.text() == "x"
    feed.step("d", finish=FinishReason.LENGTH)
    assert await feed.text() == "yzabcd"
    assert feed.aborted == []


async def test_a_stop_string_in_the_last_token_ends_with_stop_and_needs_no_abort() -> None:
    feed = Feed(stop=["!"])
    feed.step("end!", finish=FinishReason.LENGTH)
    (delta,) = await feed.deltas()
    assert (delta.text, delta.finish_reason) == ("end", FinishReason.STOP)
    assert feed.aborted == []


async def test_stop_strings_are_ignored_before_min_tokens() -> None:
    feed = Feed(stop=["b"], min_tokens=2)
    feed.step("abcd")
    feed.step("efgh")
    feed.step("xbyz")
    assert await feed.text() == "abcdefghx"


def text_before_stop(text: str, stops: list[str]) -> str:
    """What a reader who compares after every character keeps."""
    for end in range(len(text) + 1):
        found = [position for stop in stops if (position := text[:end].find(stop)) >= 0]
        if found:
            return text[: min(found)]
    return text


@given(st.text("ab", min_size=1, max_size=40), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
async def test_the_text_is_what_comes_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    feed = Feed(stop=stops)
    for index, character in enumerate(text):
        feed.step(character, finish=FinishReason.LENGTH if index == len(text) - 1 else None)
    assert await feed.text() == text_before_stop(text, stops)


async def test_an_engine_side_error_fails_the_request() -> None:
    feed = Feed()
    feed.step("", finish=FinishReason.ERROR)
    with pytest.raises(GenerationError):
        await feed.deltas()


async def test_the_death_of_the_engine_fails_every_request() -> None:
    feed = Feed()
    feed.step("abcd")
    feed.processor.fail_all(RuntimeError("gone"))
    assert await feed.text() == "abcd"
    with pytest.raises(RuntimeError, match="gone"):
        await feed.deltas()
    assert feed.processor.unfinished == 0


def test_outputs_of_a_request_its_client_has_aborted_are_dropped() -> None:
    feed = Feed()
    assert feed.processor.abort(["r", "unknown"]) == ["r"]
    feed.step("late")
    assert feed.processor.queued_tokens == 0


def test_prompt_tokens_are_queued_until_the_first_token() -> None:
    feed = Feed()
    assert feed.processor.queued_tokens == 10
    feed.step("a")
    assert feed.processor.queued_tokens == 0
    feed.step("b", finish=FinishReason.STOP)
    assert feed.processor.queued_tokens == 0


def test_times_of_a_request_are_taken_from_the_engines_clock_and_ttft_from_arrival() -> None:
    feed = Feed()
    queued = wire.EngineEvent(wire.EngineEventType.QUEUED, 10.0)
    scheduled = wire.EngineEvent(wire.EngineEventType.SCHEDULED, 12.0)
    prefill = wire.PrefillStats(
        num_prompt_tokens=10, num_computed_tokens=6, num_cached_tokens=4, num_local_cached_tokens=4
    )
    feed.step("a", engine_s=13.0, now_s=ARRIVAL_S + 3.5, events=[queued, scheduled], prefill=prefill)
    assert feed.stats.time_to_first_token_s == [3.5]
    assert (feed.stats.prompt_tokens, feed.stats.computed_tokens, feed.stats.cached_tokens) == (10, 6, 4)
    feed.step("b", engine_s=13.5)
    assert feed.stats.inter_token_latency_s == [0.5]
    feed.step("c", engine_s=15.0, now_s=ARRIVAL_S + 5.5, finish=FinishReason.LENGTH)
    (finished,) = feed.stats.finished
    assert (finished.queued_s, finished.prefill_s, finished.decode_s) == (2.0, 1.0, 2.0)
    assert (finished.inference_s, finished.e2e_s, finished.generation_tokens) == (3.0, 5.5, 3)


def test_preemptions_are_counted_when_the_next_token_tells_of_them() -> None:
    feed = Feed()
    feed.step("a")
    feed.step("b", events=[wire.EngineEvent(wire.EngineEventType.PREEMPTED, 2.0)])
    assert feed.stats.preemptions == 1


def test_a_request_aborted_before_it_was_scheduled_has_no_times() -> None:
    feed = Feed()
    feed.step("", finish=FinishReason.ABORT)
    (finished,) = feed.stats.finished
    assert (finished.queued_s, finished.prefill_s, finished.decode_s) == (0.0, 0.0, 0.0)


async def test_all_sequences_of_a_prompt_count_as_one_request() -> None:
    processor, collector, parent = OutputProcessor(), Collector(2), Parent(2, 2)
    for choice in (0, 1):
        processor.add(
            SequenceRequest(str(choice), choice, collector, 4, 8, parent, ARRIVAL_S, [], False, 0, None)
        )
    outputs = [
        wire.EngineCoreOutput("0", tokenize("ab"), finish_reason=FinishReason.STOP),
        wire.EngineCoreOutput("1", tokenize("abcdefgh"), finish_reason=FinishReason.STOP),
    ]
    stats, _ = processor.process(wire.EngineCoreOutputs(outputs=outputs), ARRIVAL_S + 1)
    assert stats is not None
    assert (stats.n_params, stats.max_generation_tokens, len(stats.finished)) == ([2], [2], 2)
    assert [delta.choice for delta in await collector.get()] == [0, 1]
