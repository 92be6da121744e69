"""What a client sees of an embedded rank and of a real one: the same shapes, the same refusals."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders_group import RankProcess, eventually, rank
from tests.builders_ports import free_port
from tests.builders_vllm import VLLM_PYTHON, real_rank_environment, vllm_python
from vllm_ranks.tiny_moe import write_tiny_moe

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

START_LIMIT_S = 240
OPTIONS = ("--max-model-len", "4096", "--enable-prompt-tokens-details")
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 3}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


class RealRank(RankProcess):
    """`vllm serve` of a tiny MoE, asked through the same methods as an embedded rank."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log.open("wb")
        command = [str(VLLM_PYTHON.parent / "vllm"), "serve", str(model), "--served-model-name", "m"]
        command += ["--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *OPTIONS],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=real_rank_environment(),
        )


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcess]:
    vllm_python()
    folder = tmp_path_factory.mktemp("real-rank")
    started = RealRank(write_tiny_moe(folder / "model"), folder / "log")
    try:
        ready = eventually(
            lambda: started.health() == 200 or started.process.poll() is not None, START_LIMIT_S
        )
        assert ready, started.log
        assert started.process.poll() is None, started.log
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def embedded() -> Iterator[RankProcess]:
    with rank("--model", "m", *OPTIONS, "--time-scale", "10") as started:
        yield started


def shape(value: Any) -> Any:
    """Keys and kinds of a JSON value, without its contents."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None if value is None else type(value).__name__


def beyond(ours: Any, theirs: Any, path: str = "$") -> list[str]:
    """What our shape has that theirs has not, or has otherwise; null stands for any kind."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            problem
            for key, item in ours.items()
            for problem in (
                beyond(item, theirs[key], f"{path}.{key}")
                if key in theirs
                else [f"{path}.{key} is not vLLM's"]
            )
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        return beyond(ours[0], theirs[0], f"{path}[]") if ours and theirs else []
    return [] if ours == theirs or None in (ours, theirs) else [f"{path}: {ours} instead of {theirs}"]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def answers(served: RankProcess, path: str, body: Any) -> Any:
    return served.post(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/completions", {**PROMPT, "echo": True, "n": 2}),
        ("/v1/chat/completions", MESSAGES),
        ("/tokenize", {"model": "m", "prompt": "hello"}),
        ("/tokenize", {"model": "m", "prompt": "hello", "return_token_strs": True}),
        ("/detokenize", {"model": "m", "tokens": [101]}),
    ],
)
def test_answers_have_vllms_fields(real: RankProcess, embedded: RankProcess, path: str, body: Any) -> None:
    theirs, ours = real.post(path, body), embedded.post(path, body)
    assert beyond(shape(ours), shape(theirs)) == []
    # And nothing that vLLM says is left out.
    assert beyond(shape(without_nulls(theirs)), shape(ours)) == []


def events(served: RankProcess, path: str, body: Any) -> list[Any]:
    status, headers, raw = served.request("POST", path, body)
    assert status == 200
    assert headers.get("Content-Type", headers.get("content-type")) == "text/event-stream; charset=utf-8"
    data = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", MESSAGES)])
@pytest.mark.parametrize(
    "usage", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_streams_have_vllms_chunks(
    real: RankProcess, embedded: RankProcess, path: str, body: Any, usage: Any
) -> None:
    streaming = {**body, "stream": True, "ignore_eos": True, **({"stream_options": usage} if usage else {})}
    theirs, ours = events(real, path, streaming), events(embedded, path, streaming)
    assert len(ours) == len(theirs)
    for our_chunk, their_chunk in zip(ours, theirs, strict=True):
        assert beyond(shape(our_chunk), shape(their_chunk)) == []
        assert beyond(shape(without_nulls(their_chunk)), shape(our_chunk)) == []
    finishes = [
        [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        for chunks in (ours, theirs)
    ]
    assert finishes[0] == finishes[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**PROMPT, "model": "nobody"}),
        ("/v1/chat/completions", {**MESSAGES, "model": "nobody"}),
        ("/v1/completions", {**PROMPT, "max_tokens": -1}),
        ("/v1/completions", {**PROMPT, "max_tokens": 100_000}),
        ("/v1/completions", {**PROMPT, "temperature": -1}),
        ("/v1/completions", {**PROMPT, "top_p": 2}),
        ("/v1/completions", {**PROMPT, "n": 0}),
        ("/v1/completions", {**PROMPT, "min_tokens": 9}),
        ("/v1/completions", {**PROMPT, "stop": ""}),
        ("/v1/completions", {**PROMPT, "stop": [1]}),
        ("/v1/completions", {**PROMPT, "prompt": ""}),
        ("/v1/completions", {**PROMPT, "prompt": "x" * 40_000}),
        ("/v1/completions", {**PROMPT, "prompt": [1 << 62]}),
        ("/v1/completions", {**PROMPT, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**PROMPT, "cache_salt": ""}),
        ("/v1/completions", {"model": "m"}),
        ("/v1/completions", b"{nonsense"),
        ("/v1/chat/completions", {**MESSAGES, "messages": []}),
        ("/v1/chat/completions", {**MESSAGES, "tools": []}),
        ("/v1/nothing", {}),
        ("/v1/models", {}),
    ],
)
def test_what_vllm_refuses_is_refused_with_the_same_status(
    real: RankProcess, embedded: RankProcess, path: str, body: Any
) -> None:
    their_status, _, _ = real.request("POST", path, body)
    our_status, _, our_body = embedded.request("POST", path, body)
    assert our_status == their_status
    assert set(json.loads(our_body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model_is_refused_in_the_same_words(
    real: RankProcess, embedded: RankProcess, path: str
) -> None:
    body = {**(MESSAGES if "chat" in path else PROMPT), "model": "nobody"}
    assert json.loads(embedded.request("POST", path, body)[2]) == json.loads(
        real.request("POST", path, body)[2]
    )


def test_a_rank_that_is_not_here_is_refused_in_the_same_words(
    real: RankProcess, embedded: RankProcess
) -> None:
    header = {"X-data-parallel-rank": "1"}
    ours = embedded.request("POST", "/v1/completions", PROMPT, headers=header)
    theirs = real.request("POST", "/v1/completions", PROMPT, headers=header)
    assert (ours[0], json.loads(ours[2])) == (theirs[0], json.loads(theirs[2]))


@pytest.mark.parametrize("path", ["/load", "/kv_event_sources"])
def test_small_endpoints_say_the_same(real: RankProcess, embedded: RankProcess, path: str) -> None:
    assert json.loads(embedded.get(path)) == json.loads(real.get(path))


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_health_answers_are_the_same(
    real: RankProcess, embedded: RankProcess, method: str, path: str
) -> None:
    ours, theirs = embedded.request(method, path), real.request(method, path)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])


def test_models_are_listed_the_same_way(real: RankProcess, embedded: RankProcess) -> None:
    theirs, ours = (json.loads(served.get("/v1/models")) for served in (real, embedded))
    assert beyond(shape(ours), shape(theirs)) == []
    assert ours["data"][0]["max_model_len"] == theirs["data"][0]["max_model_len"]


@pytest.mark.parametrize("asked", ["text", "json"])
def test_orca_reports_are_the_same_when_idle(real: RankProcess, embedded: RankProcess, asked: str) -> None:
    def report(served: RankProcess) -> str:
        header = {"endpoint-load-metrics-format": asked}
        _, headers, _ = served.request("POST", "/v1/completions", PROMPT, headers=header)
        return {name.lower(): value for name, value in headers.items()}["endpoint-load-metrics"]

    assert report(embedded) == report(real)


def test_metrics_have_the_same_series_with_the_same_labels(real: RankProcess, embedded: RankProcess) -> None:
    def series(served: RankProcess) -> dict[str, tuple[str, set[frozenset[str]]]]:
        families = text_string_to_metric_families(served.get("/metrics").decode())
        return {
            family.name: (family.type, {frozenset(sample.labels) for sample in family.samples})
            for family in families
            if family.name.startswith("vllm:")
        }

    assert series(embedded) == series(real)
