"""Reading a rank's gauges out of its Prometheus text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ext_proc.vocabulary import RankCounters
from vllm_ranks.reports.metrics_text import (
    MAX_ADAPTER_CHARS,
    MAX_ADAPTERS,
    MAX_ADAPTERS_LINE_CHARS,
    UnreadableReport,
    parse_metrics,
)

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
    steps = Histogram("vllm:iteration_tokens_total", "help", labels, registry=registry)
    for engine in values_by_engine:
        steps.labels(model, engine).observe(9)
    return generate_latest(registry).decode()


def test_one_engine_is_read_with_its_label() -> None:
    read = parse_metrics(page({"3": (5, 2, 0.25)}))
    assert (read.running, read.waiting, read.kv_cache_usage) == (5, 2, 0.25)
    assert read.engine_steps == 1
    assert read.engines == {"3"}


def test_several_engines_of_one_page_are_summed_and_the_fullest_cache_counts() -> None:
    read = parse_metrics(page({"0": (5, 2, 0.25), "1": (1, 0, 0.75)}))
    assert (read.running, read.waiting, read.kv_cache_usage) == (6, 2, 0.75)
    assert read.engines == {"0", "1"}


def test_counters_are_read_when_all_are_there() -> None:
    registry = CollectorRegistry()
    first = Histogram("vllm:time_to_first_token_seconds", "help", ["engine"], registry=registry)
    between = Histogram("vllm:inter_token_latency_seconds", "help", ["engine"], registry=registry)
    first.labels("0").observe(0.5)
    for seconds in (0.25, 0.5):
        between.labels("0").observe(seconds)
    prompts = Counter("vllm:prompt_tokens_by_source", "help", ["engine", "source"], registry=registry)
    prompts.labels("0", "local_compute").inc(700)
    prompts.labels("0", "local_cache_hit").inc(300)
    counters = generate_latest(registry).decode()
    assert parse_metrics(page({"0": (0, 0, 0)}) + counters).counters == RankCounters(1, 0.75, 2, 700)
    assert parse_metrics(page({"0": (0, 0, 0)})).counters is None


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ({"kv_cache_size_tokens": "4096", "num_gpu_blocks": "1", "block_size": "16"}, 4096),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks": "100", "block_size": "16"}, 1600),
        ({"num_gpu_blocks": "None", "block_size": "16"}, None),
        ({}, None),
    ],
)
def test_the_size_of_the_kv_cache_is_read_from_its_configuration(
    labels: dict[str, str], tokens: int | None
) -> None:
    printed = ",".join(f'{name}="{value}"' for name, value in labels.items())
    text = page({"0": (0, 0, 0)}) + f"vllm:cache_config_info{{{printed}}} 1.0\n"
    assert parse_metrics(text).kv_capacity_tokens == tokens


def test_an_embedded_rank_also_tells_its_wave() -> None:
    text = page({"0": (0, 0, 0)}) + 'embedded:data_parallel_wave{engine="0"} 7.0\n'
    assert parse_metrics(text).wave == 7


def with_adapters(*told: tuple[str, str, float]) -> str:
    """A page whose engine has written that these adapters run, and these wait, at these times."""
    registry = CollectorRegistry()
    labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
    gauge = Gauge("vllm:lora_requests_info", "help", labels, registry=registry)
    for running, waiting, at_s in told:
        gauge.labels("2", waiting, running).set(at_s)
    return page({"0": (0, 0, 0)}) + generate_latest(registry).decode()


def test_adapters_are_those_that_run_or_wait_at_the_newest_of_all_times_told() -> None:
    newest = ("poet,clerk", "poet,judge", 1.7e9 + 0.2)
    text = with_adapters(("gone", "", 1.7e9 + 0.1), newest, ("", "", 1.7e9))
    assert parse_metrics(text).adapters == {"poet", "clerk", "judge"}


def test_an_engine_that_has_become_idle_runs_no_adapter() -> None:
    assert parse_metrics(with_adapters(("poet", "poet", 1.7e9), ("", "", 1.7e9 + 1))).adapters == frozenset()
    assert parse_metrics(with_adapters()).adapters == frozenset()
    assert parse_metrics(page({"0": (0, 0, 0)})).adapters == frozenset()


def test_only_so_many_adapters_are_taken_from_a_page_and_none_with_an_endless_name() -> None:
    names = [f"a{number}" for number in range(2 * MAX_ADAPTERS)]
    read = parse_metrics(with_adapters((",".join(names), "", 1.7e9)))
    assert read.adapters == set(names[:MAX_ADAPTERS])
    longest = "x" * MAX_ADAPTER_CHARS
    assert parse_metrics(with_adapters((f"{longest}x,{longest}", "", 1.7e9))).adapters == {longest}
    endless = "x," * (MAX_ADAPTERS_LINE_CHARS // 2)
    assert parse_metrics(with_adapters((endless, "", 1.7e9))).adapters == frozenset()


@given(
    st.lists(
        st.tuples(st.lists(st.text('ab\n"\\ {}=', min_size=1), max_size=4), st.floats(1e9, 2e9)),
        unique_by=(lambda told: tuple(told[0]), lambda told: told[1]),
    )
)
def test_adapters_are_read_back_whatever_their_names(told: list[tuple[list[str], float]]) -> None:
    text = with_adapters(*((",".join(names), "", at_s) for names, at_s in told))
    newest = max(told, key=lambda one: one[1], default=([], 0.0))
    assert parse_metrics(text).adapters == set(newest[0])


@pytest.mark.parametrize("missing", GAUGE_NAMES)
def test_a_missing_gauge_is_named(missing: str) -> None:
    text = "\n".join(
        line for line in page({"0": (0, 0, 0)}).splitlines() if not line.startswith(missing + "{")
    )
    with pytest.raises(UnreadableReport, match=missing):
        parse_metrics(text)


@pytest.mark.parametrize("line", ['{running_lora_adapters="a"} today', "{running_lora_adapters} 1.7e9"])
def test_a_malformed_line_on_adapters_is_refused(line: str) -> None:
    with pytest.raises(UnreadableReport):
        parse_metrics(page({"0": (0, 0, 0)}) + f"vllm:lora_requests_info{line}\n")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e308", "many", ""])
def test_a_value_that_is_no_count_is_refused(value: str) -> None:
    with pytest.raises(UnreadableReport):
        parse_metrics(page({"0": (0, 0, 0)}) + f'vllm:num_requests_running{{engine="1"}} {value}\n')


@pytest.mark.parametrize("size", ["9" * 16, "9" * 400, "9" * 5000])
@pytest.mark.parametrize("label", ["kv_cache_size_tokens", "num_gpu_blocks", "block_size"])
def test_a_kv_cache_larger_than_can_be_is_refused(label: str, size: str) -> None:
    labels = {"num_gpu_blocks": "100", "block_size": "16", label: size}
    printed = ",".join(f'{name}="{value}"' for name, value in labels.items())
    with pytest.raises(UnreadableReport):
        parse_metrics(page({"0": (0, 0, 0)}) + f"vllm:cache_config_info{{{printed}}} 1.0\n")


def test_a_page_with_more_lines_that_matter_than_engines_could_have_is_refused() -> None:
    with pytest.raises(UnreadableReport, match="more than"):
        parse_metrics('vllm:num_requests_running{engine="0"} 1\n' * 10_000)
    assert parse_metrics(page({str(rank): (1, 0, 0) for rank in range(256)})).running == 256


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
    read = parse_metrics(page(values, model))
    assert read.running == sum(v[0] for v in values.values())
    assert read.waiting == sum(v[1] for v in values.values())
    assert read.kv_cache_usage == max(v[2] for v in values.values())
    assert read.engines == set(values)


@given(st.text())
def test_no_text_breaks_the_reading_otherwise(text: str) -> None:
    with pytest.raises(UnreadableReport):
        parse_metrics(text)


@given(st.lists(st.tuples(st.sampled_from(GAUGE_NAMES), st.text(), st.text()), max_size=5))
def test_no_line_breaks_the_reading_otherwise(lines: list[tuple[str, str, str]]) -> None:
    try:
        parse_metrics("".join(f"{name}{{{labels}}} {value}\n" for name, labels, value in lines))
    except UnreadableReport:
        pass
