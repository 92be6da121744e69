"""The series of an embedded rank against those of vLLM's own metric logger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.builders_group import rank
from tests.builders_vllm import ask_vllm

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 4096
Families = dict[str, Metric]


def families(text: str) -> Families:
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in found.items() if name.startswith("vllm:")}


@pytest.fixture(scope="module")
def embedded() -> Iterator[Families]:
    options = ("--model", "m", "--max-model-len", str(MAX_MODEL_LEN), "--enable-lora", "--max-loras", "2")
    with rank(*options, "--time-scale", "10") as served:
        served.complete()
        yield families(served.get("/metrics").decode())


@pytest.fixture(scope="module")
def real() -> Families:
    question = {
        "model_name": "m",
        "max_model_len": MAX_MODEL_LEN,
        "max_loras": 2,
        "block_size": 16,
        "engine": 0,
    }
    return families(ask_vllm("metrics", question))


def label_names(family: Metric) -> dict[str, set[frozenset[str]]]:
    """By sample name, the sets of label names its series have."""
    names: dict[str, set[frozenset[str]]] = {}
    for sample in family.samples:
        names.setdefault(sample.name, set()).add(frozenset(sample.labels))
    return names


def label_values(family: Metric, name: str) -> set[str]:
    return {sample.labels[name] for sample in family.samples if name in sample.labels}


def test_every_series_of_vllm_is_there_and_no_other(embedded: Families, real: Families) -> None:
    assert set(embedded) == set(real)
    assert len(real) > 40


def test_types_are_the_same(embedded: Families, real: Families) -> None:
    assert {name: family.type for name, family in embedded.items()} == {
        name: family.type for name, family in real.items()
    }


def test_labels_are_the_same(embedded: Families, real: Families) -> None:
    assert {name: label_names(family) for name, family in embedded.items()} == {
        name: label_names(family) for name, family in real.items()
    }


@pytest.mark.parametrize(
    "label", ["reason", "source", "finished_reason", "sleep_state", "le", "model_name", "engine"]
)
def test_values_of_enumerated_labels_are_the_same(embedded: Families, real: Families, label: str) -> None:
    assert {name: label_values(family, label) for name, family in embedded.items()} == {
        name: label_values(family, label) for name, family in real.items()
    }


def test_the_cache_is_described_with_vllms_words(embedded: Families, real: Families) -> None:
    def described(found: Families) -> dict[str, Any]:
        (sample,) = found["vllm:cache_config_info"].samples
        return sample.labels

    for name in ("block_size", "enable_prefix_caching", "cache_dtype", "engine"):
        assert described(embedded)[name] == described(real)[name]
