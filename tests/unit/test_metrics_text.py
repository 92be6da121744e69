"""Reading a rank's gauges out of its Prometheus text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from vllm_ranks.reports.metrics_text import EngineGauges, UnreadableReport, parse_gauges

GAUGE_NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def page(values_by_engine: dict[str, tuple[float, float, float]], model: str = "m") -> str:
    """A metrics page as vLLM prints it, by the library vLLM prints it with, with other series around."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    for position, name in enumerate(GAUGE_NAMES):
        gauge = Gauge(name, "help", labels, registry=registry)
        for engine, values in values_by_engine.items():
            gauge.labels(model, engine).set(values[position])
    by_reason = Gauge("vllm:num_requests_waiting_by_reason", "help", [*labels, "reason"], registry=registry)
    by_reason.labels(model, "0", "capacity").set(99)
    Histogram("vllm:iteration_tokens_total", "help", labels, registry=registry).labels(model, "0").observe(9)
    return generate_latest(registry).decode()


def test_one_engine_is_read_with_its_label() -> None:
    assert parse_gauges(page({"3": (5, 2, 0.25)})) == EngineGauges(5, 2, 0.25, None, frozenset({"3"}))


def test_several_engines_of_one_page_are_summed() -> None:
    gauges = parse_gauges(page({"0": (5, 2, 0.25), "1": (1, 0, 0.75)}))
    assert gauges == EngineGauges(6, 2, 0.75, None, frozenset({"0", "1"}))


def test_an_embedded_rank_also_tells_its_wave() -> None:
    text = page({"0": (0, 0, 0)}) + 'embedded:data_parallel_wave{engine="0"} 7.0\n'
    assert parse_gauges(text).wave == 7


@pytest.mark.parametrize("missing", GAUGE_NAMES)
def test_a_missing_gauge_is_named(missing: str) -> None:
    text = "\n".join(
        line for line in page({"0": (0, 0, 0)}).splitlines() if not line.startswith(missing + "{")
    )
    with pytest.raises(UnreadableReport, match=missing):
        parse_gauges(text)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many", ""])
def test_a_value_that_is_no_count_is_refused(value: str) -> None:
    with pytest.raises(UnreadableReport):
        parse_gauges(page({"0": (0, 0, 0)}) + f'vllm:num_requests_running{{engine="1"}} {value}\n')


@given(
    st.dictionaries(
        st.integers(0, 1023).map(str),
        st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 1)),
        min_size=1,
        max_size=4,
    ),
    st.text(min_size=1),
)
def test_what_the_library_prints_is_read_back(values: dict[str, tuple[int, int, float]], model: str) -> None:
    gauges = parse_gauges(page(values, model))
    assert gauges.running == sum(v[0] for v in values.values())
    assert gauges.waiting == sum(v[1] for v in values.values())
    assert gauges.kv_cache_usage == max(v[2] for v in values.values())
    assert gauges.engines == set(values)


@given(st.text())
def test_no_text_breaks_the_reading_otherwise(text: str) -> None:
    with pytest.raises(UnreadableReport):
        parse_gauges(text)
