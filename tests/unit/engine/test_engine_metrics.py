from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_ranks.engine import orca, wire
from vllm_ranks.engine.metric_buckets import request_token_buckets
from vllm_ranks.engine.metrics import EngineMetrics, FinishedRequest, IterationStats
from vllm_ranks.engine.request import FinishReason


def metrics(*engines: int, max_loras: int = 0, lock_step: bool = True) -> EngineMetrics:
    return EngineMetrics(
        "m",
        engines or (0,),
        max_model_len=1000,
        cache_info={"block_size": "16"},
        max_loras=max_loras,
        lock_step=lock_step,
    )


def samples(exposed: EngineMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(exposed.expose().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(exposed: EngineMetrics, name: str, **labels: str) -> float:
    if not labels:
        labels = {"model_name": "m", "engine": "0"}
    return samples(exposed)[name, frozenset(labels.items())]


def test_gauges_say_what_the_engine_reported_last() -> None:
    exposed = metrics(3)
    exposed.record_scheduler(
        3, wire.SchedulerStats(num_running_reqs=2, num_waiting_reqs=5, kv_cache_usage=0.25)
    )
    labels = {"model_name": "m", "engine": "3"}
    assert value(exposed, "vllm:num_requests_running", **labels) == 2
    assert value(exposed, "vllm:num_requests_waiting", **labels) == 5
    assert value(exposed, "vllm:num_requests_waiting_by_reason", **labels, reason="capacity") == 5
    assert value(exposed, "vllm:num_requests_waiting_by_reason", **labels, reason="deferred") == 0
    assert value(exposed, "vllm:kv_cache_usage_perc", **labels) == 0.25


def test_counters_add_up_over_iterations() -> None:
    exposed = metrics()
    iteration = IterationStats(
        prompt_tokens=10, computed_tokens=6, cached_tokens=4, generation_tokens=3, preemptions=1
    )
    for _ in range(2):
        exposed.record_iteration(0, iteration)
    assert value(exposed, "vllm:prompt_tokens_total") == 20
    assert value(exposed, "vllm:generation_tokens_total") == 6
    assert value(exposed, "vllm:prompt_tokens_cached_total") == 8
    assert value(exposed, "vllm:num_preemptions_total") == 2
    assert value(exposed, "vllm:iteration_tokens_total_sum") == 18
    assert value(exposed, "vllm:iteration_tokens_total_count") == 2
    source = {"model_name": "m", "engine": "0", "source": "local_cache_hit"}
    assert value(exposed, "vllm:prompt_tokens_by_source_total", **source) == 8


def test_prefix_cache_lookups_are_counted_in_tokens() -> None:
    exposed = metrics()
    exposed.record_scheduler(
        0, wire.SchedulerStats(prefix_cache_stats=wire.PrefixCacheStats(queries=64, hits=16))
    )
    assert value(exposed, "vllm:prefix_cache_queries_total") == 64
    assert value(exposed, "vllm:prefix_cache_hits_total") == 16
    tier = {"model_name": "m", "engine": "0", "source": "device"}
    assert value(exposed, "vllm:prompt_tokens_cached_by_source_total", **tier) == 16


def test_a_finished_request_is_counted_by_reason_with_its_times() -> None:
    exposed = metrics()
    finished = FinishedRequest(
        reason=FinishReason.LENGTH,
        prompt_tokens=10,
        generation_tokens=5,
        cached_tokens=4,
        max_tokens=5,
        preemptions=0,
        e2e_s=3.0,
        queued_s=0.5,
        prefill_s=0.5,
        decode_s=2.0,
        inference_s=2.5,
    )
    exposed.record_iteration(0, IterationStats(finished=[finished]))
    reason = {"model_name": "m", "engine": "0", "finished_reason": "length"}
    assert value(exposed, "vllm:request_success_total", **reason) == 1
    assert value(exposed, "vllm:request_time_per_output_token_seconds_sum") == 0.5
    assert value(exposed, "vllm:request_prefill_kv_computed_tokens_sum") == 6
    assert value(exposed, "vllm:request_params_max_tokens_sum") == 5


def test_the_engine_is_awake() -> None:
    exposed = metrics()
    states = {
        state: value(exposed, "vllm:engine_sleep_state", model_name="m", engine="0", sleep_state=state)
        for state in ("awake", "weights_offloaded", "discard_all")
    }
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def test_every_engine_of_the_server_has_its_series() -> None:
    exposed = metrics(2, 3)
    assert value(exposed, "vllm:num_requests_running", model_name="m", engine="2") == 0
    assert value(exposed, "vllm:cache_config_info", block_size="16", engine="3") == 1


def test_waves_are_told_for_lock_step_groups_only() -> None:
    exposed = metrics()
    exposed.record_wave(7, True)
    assert value(exposed, "embedded:data_parallel_wave") == 7
    assert value(exposed, "embedded:data_parallel_running") == 1
    assert b"embedded:" not in metrics(lock_step=False).expose()


def test_rejections_have_no_engine_label() -> None:
    exposed = metrics()
    exposed.record_rejection("max_num_queued_reqs")
    assert (
        value(exposed, "vllm:admission_rejections_total", model_name="m", reason="max_num_queued_reqs") == 1
    )


def test_lora_names_appear_with_the_time_they_were_seen_in_a_bounded_number_of_series() -> None:
    exposed = metrics(max_loras=2)
    for index in range(100):
        exposed.record_scheduler(0, wire.SchedulerStats(running_lora_adapters={f"a{index}": 1}))
    series = [labels for name, labels in samples(exposed) if name == "vllm:lora_requests_info"]
    assert len(series) == 64
    newest = {"max_lora": "2", "waiting_lora_adapters": "", "running_lora_adapters": "a99"}
    assert value(exposed, "vllm:lora_requests_info", **newest) > 1_000_000_000


def test_token_buckets_are_a_1_2_5_series_up_to_the_models_length() -> None:
    assert request_token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert request_token_buckets(499)[-1] == 200


# --- ORCA -----------------------------------------------------------------------------------------------

LATEST = [wire.SchedulerStats(num_waiting_reqs=3, num_running_reqs=9, kv_cache_usage=0.1)]


@pytest.mark.parametrize("asked", ["text", "TEXT"])
def test_an_orca_report_as_text(asked: str) -> None:
    assert orca.load_headers(asked, LATEST) == {
        "endpoint-load-metrics": (
            "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.1"
        )
    }


def test_an_orca_report_as_json() -> None:
    assert orca.load_headers("json", LATEST) == {
        "endpoint-load-metrics": (
            'JSON {"named_metrics": {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.1}}'
        )
    }


@pytest.mark.parametrize("asked", [None, "", "bin", "x" * 1000])
def test_no_orca_report_for_other_formats(asked: str | None) -> None:
    assert orca.load_headers(asked, LATEST) == {}
