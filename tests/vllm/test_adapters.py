"""What a rank tells of its LoRA adapters: vLLM's words, the embedded engine's, and what the gateway reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders_vllm import ask_vllm
from vllm_ranks.engine import wire
from vllm_ranks.engine.metrics import EngineMetrics
from vllm_ranks.engine.output_processor import Collector, OutputProcessor, Parent, SequenceRequest
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.reports.metrics_text import parse_metrics

pytestmark = pytest.mark.vllm

MAX_LORAS = 2
Step = list[tuple[str, str, str | None]]
STEPS: list[Step] = [
    [],
    [("waiting", "a", "poet"), ("running", "a", "poet"), ("waiting", "b", None), ("running", "b", None)],
    [("waiting", "c", "clerk")],
    [("waiting", "d", "poet"), ("running", "d", "poet"), ("finished", "a", "poet")],
    [("running", "c", "clerk"), ("waiting", "d", "poet")],
    [("finished", "d", "poet")],
    [("waiting", "e", "poet"), ("running", "e", "poet")],
    [("finished", "c", "clerk"), ("finished", "e", "poet"), ("finished", "b", None)],
]
EVENTS = {"waiting": wire.EngineEventType.QUEUED, "running": wire.EngineEventType.SCHEDULED}


def told_by_the_embedded_engine() -> list[str]:
    """Its page after each step."""
    processor = OutputProcessor()
    metrics = EngineMetrics("m", [0], max_model_len=1024, cache_info={}, max_loras=MAX_LORAS, lock_step=False)
    known: set[str] = set()
    pages = []
    for step in STEPS:
        for change, request_id, adapter in step:
            if request_id not in known:
                known.add(request_id)
                processor.add(sequence(request_id, adapter))
            event = EVENTS.get(change)
            output = wire.EngineCoreOutput(
                request_id,
                [],
                finish_reason=FinishReason.STOP if event is None else None,
                events=None if event is None else [wire.EngineEvent(event, 1.0)],
            )
            processor.process(wire.EngineCoreOutputs(outputs=[output], timestamp=1.0), 1.0)
        stats = wire.SchedulerStats()
        processor.add_lora_counts(stats)
        metrics.record_scheduler(0, stats)
        pages.append(metrics.expose().decode())
    return pages


def sequence(request_id: str, adapter: str | None) -> SequenceRequest:
    return SequenceRequest(
        request_id=request_id,
        choice=0,
        collector=Collector(1),
        prompt_tokens=10,
        max_tokens=100,
        parent=Parent(1, 1),
        arrival_s=0.0,
        stop=[],
        include_stop_in_output=False,
        min_tokens=0,
        lora_name=adapter,
    )


def labels(page: str) -> list[dict[str, str]]:
    """Label sets on a page, the one written last first."""
    families = {family.name: family for family in text_string_to_metric_families(page)}
    samples = families["vllm:lora_requests_info"].samples
    return [sample.labels for sample in sorted(samples, key=lambda sample: -sample.value)]


def test_adapters_are_told_in_vllms_words_and_read_as_what_has_requests() -> None:
    real = ask_vllm("adapters", {"max_loras": MAX_LORAS, "steps": STEPS})
    embedded = told_by_the_embedded_engine()
    assert [labels(page) for page in embedded] == [labels(page) for page in real]
    expected = [set(), {"poet"}, {"poet", "clerk"}, {"poet", "clerk"}, {"poet", "clerk"}, {"clerk"}]
    expected += [{"clerk", "poet"}, set()]
    assert [parse_metrics(page).adapters for page in real] == expected
