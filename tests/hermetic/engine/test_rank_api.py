"""One rank's API, as clients see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.builders_group import RankProcess, rank


@pytest.fixture(scope="module")
def served() -> Iterator[RankProcess]:
    options = ("--model", "m", "--served-model-name", "m", "--served-model-name", "alias")
    with rank(
        *options,
        *("--time-scale", "10", "--max-model-len", "4096", "--enable-request-id-headers"),
        *(
            "--enable-server-load-tracking",
            "--enable-prompt-tokens-details",
            "--scheduling-policy",
            "priority",
        ),
        *("--enable-lora", "--lora-modules", "poet=/adapters/poet"),
    ) as started:
        yield started


@pytest.fixture
def client(served: RankProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as official:
        yield official


def user(content: str = "hello") -> Any:
    return [{"role": "user", "content": content}]


def refused(served: RankProcess, path: str, body: Any) -> dict[str, Any]:
    status, _, answer = served.request("POST", path, body)
    error: dict[str, Any] = json.loads(answer)["error"]
    assert error["code"] == status
    return error


# --- Generation -----------------------------------------------------------------------------------------


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=user(), max_completion_tokens=8)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)


def test_a_streamed_chat_has_the_text_of_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=user("stream"), max_tokens=40)
    stream = client.chat.completions.create(
        model="m",
        messages=user("stream"),
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40


def test_a_completion_without_limit_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=user("how long?"))
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 1024


def test_ignore_eos_generates_all_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="m", prompt="x", max_tokens=1500, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1500


def test_min_tokens_outlasts_the_natural_end(served: RankProcess) -> None:
    answer = served.complete("x", max_tokens=2000, min_tokens=1200)
    assert answer["usage"]["completion_tokens"] >= 1200


def test_n_choices_differ_and_are_reproducible(client: openai.OpenAI) -> None:
    texts = [
        [c.text for c in client.completions.create(model="m", prompt="many", n=3, max_tokens=8).choices]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_a_seed_changes_the_text(served: RankProcess) -> None:
    texts = {served.complete("seeded", seed=seed)["choices"][0]["text"] for seed in (1, 2)}
    assert len(texts) == 2


def test_several_prompts_are_answered_in_order(served: RankProcess) -> None:
    alone = [served.complete(prompt)["choices"][0]["text"] for prompt in ("one", "two")]
    together = served.complete(["one", "two"])
    assert [choice["text"] for choice in together["choices"]] == alone
    assert [choice["index"] for choice in together["choices"]] == [0, 1]
    assert together["usage"]["completion_tokens"] == 8


def test_token_ids_and_text_are_the_same_prompt(served: RankProcess) -> None:
    tokens = served.post("/tokenize", {"prompt": "same"})["tokens"]
    assert served.complete(tokens)["choices"][0]["text"] == served.complete("same")["choices"][0]["text"]


def test_a_stop_string_ends_the_text_and_frees_the_engine(served: RankProcess) -> None:
    whole = served.complete("stop", max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    stop = whole.split(" ")[3]
    answer = served.complete("stop", max_tokens=3000, ignore_eos=True, stop=[f" {stop}"])
    (choice,) = answer["choices"]
    assert choice["text"] == whole[: whole.index(f" {stop}")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", f" {stop}")
    assert answer["usage"]["completion_tokens"] < 60


def test_echo_returns_the_prompt_first(served: RankProcess) -> None:
    plain = served.complete("échô 🌊 ")["choices"][0]["text"]
    assert served.complete("échô 🌊 ", echo=True)["choices"][0]["text"] == f"échô 🌊 {plain}"
    alone = served.complete("only this", echo=True, max_tokens=0)
    assert alone["choices"][0]["text"] == "only this"
    assert alone["usage"]["completion_tokens"] == 0


def test_continuous_usage_counts_along(served: RankProcess) -> None:
    _, _, body = served.request(
        "POST",
        "/v1/completions",
        {
            "prompt": "count",
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 5, 5]


def test_a_repeated_prompt_is_found_in_the_prefix_cache(served: RankProcess) -> None:
    prompt = "a long prompt that is said twice " * 20
    served.complete(prompt)
    again = served.complete(prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
    salted = served.complete(prompt, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_conversation_goes_on_in_the_prefix_cache(served: RankProcess) -> None:
    first = {"role": "user", "content": "let us talk about waves " * 10}
    answer = served.post("/v1/chat/completions", {"messages": [first], "max_tokens": 64, "ignore_eos": True})
    reply = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    messages = [first, reply, {"role": "user", "content": "more"}]
    more = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    # Prompt and reply, except for what does not fill a block of 16.
    both = answer["usage"]["total_tokens"]
    assert both - 32 <= more["usage"]["prompt_tokens_details"]["cached_tokens"] <= both


def test_a_lora_adapter_is_a_model_of_its_own(served: RankProcess) -> None:
    assert served.complete("verse", model="poet")["model"] == "poet"
    names = [card["id"] for card in json.loads(served.get("/v1/models"))["data"]]
    assert names == ["m", "alias", "poet"]
    assert 'running_lora_adapters="poet"' in served.get("/metrics").decode()


def test_every_served_name_works(served: RankProcess) -> None:
    assert served.complete("x", model="alias")["model"] == "alias"


# --- Refusals -------------------------------------------------------------------------------------------


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `gpt-9` does not exist") as caught:
        client.chat.completions.create(model="gpt-9", messages=user())
    assert caught.value.param == "model"


def test_a_prompt_longer_than_the_model_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        client.completions.create(model="m", prompt="x" * 20_000)


def test_logprobs_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=user(), logprobs=True)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{nonsense", 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": -3}, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": 3, "min_tokens": 9}, 400),
        ("/v1/completions", {"prompt": [2**40]}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/unheard-of", {}, 404),
        ("/v1/models", {}, 405),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/tokenize", {}, 400),
    ],
)
def test_errors_have_openais_format(served: RankProcess, path: str, body: Any, status: int) -> None:
    error = refused(served, path, body)
    assert error["code"] == status
    assert error["message"]


@pytest.mark.parametrize("header", ["1", "-1", "7"])
def test_a_data_parallel_rank_that_is_not_here_is_a_400(served: RankProcess, header: str) -> None:
    status, _, body = served.request(
        "POST", "/v1/completions", {"prompt": "x"}, headers={"X-data-parallel-rank": header}
    )
    assert status == 400
    assert json.loads(body)["error"]["message"] == f"data_parallel_rank {header} is out of range [0, 1)."


@pytest.mark.parametrize("header", ["0", "nonsense"])
def test_a_data_parallel_rank_that_is_here_or_no_number_is_fine(served: RankProcess, header: str) -> None:
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-data-parallel-rank": header})


def test_a_refused_request_leaves_nothing_behind(served: RankProcess) -> None:
    before = served.metric("vllm:request_success_total")
    refused(served, "/v1/completions", {"prompt": "x", "model": "nobody"})
    assert served.metric("vllm:num_requests_running") == 0
    assert served.metric("vllm:request_success_total") == before


# --- Everything else ------------------------------------------------------------------------------------


def test_it_says_that_it_is_the_embedded_engine(served: RankProcess) -> None:
    status, headers, body = served.request("GET", "/version")
    version = json.loads(body)
    assert status == 200
    assert "embedded" in version["version"]
    assert "vllm serve" in version["notice"]
    assert headers["Server"].startswith("wavegate-embedded/")
    assert "`vllm serve` is the production engine" in served.log


def test_tokenize_and_detokenize_are_inverse(served: RankProcess) -> None:
    text = "wave 🌊 gate, naïve"
    answer = served.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert served.post("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}


def test_a_conversation_can_be_tokenized(served: RankProcess) -> None:
    count = served.post("/tokenize", {"messages": user("count me")})["count"]
    usage = served.post("/v1/chat/completions", {"messages": user("count me"), "max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == count


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_health(served: RankProcess, method: str, path: str) -> None:
    assert served.request(method, path)[0] == 200


def test_no_kv_event_sources_unless_configured(served: RankProcess) -> None:
    assert json.loads(served.get("/kv_event_sources")) == {}


def test_fault_injection_does_not_exist_unless_asked_for(served: RankProcess) -> None:
    assert served.request("POST", "/fault_injection", {"fault": "refuse"})[0] == 404


def test_the_clients_request_id_comes_back(served: RankProcess) -> None:
    status, headers, body = served.request(
        "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine"}
    )
    assert status == 200
    assert json.loads(body)["id"] == headers["X-Request-Id"] == "cmpl-mine"


def test_an_orca_report_comes_with_answers_that_are_not_streamed(served: RankProcess) -> None:
    asked = {"endpoint-load-metrics-format": "text"}
    request = {"prompt": "x", "max_tokens": 1}
    _, headers, _ = served.request("POST", "/v1/completions", request, headers=asked)
    assert headers["endpoint-load-metrics"].startswith("TEXT named_metrics.num_requests_waiting=")
    _, headers, _ = served.request("POST", "/v1/completions", {**request, "stream": True}, headers=asked)
    assert "endpoint-load-metrics" not in headers
    _, headers, _ = served.request("POST", "/v1/completions", request)
    assert "endpoint-load-metrics" not in headers


def test_metrics_tell_what_happened(served: RankProcess) -> None:
    before = {
        name: served.metric(name)
        for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    }
    served.complete("measured prompt", max_tokens=6)
    assert served.metric("vllm:generation_tokens_total") == before["vllm:generation_tokens_total"] + 6
    assert served.metric("vllm:prompt_tokens_total") == before["vllm:prompt_tokens_total"] + 4
    assert served.metric("vllm:request_success_total") == before["vllm:request_success_total"] + 1
    assert served.metric("vllm:num_requests_running", engine="0", model_name="m") == 0
    assert served.metric("vllm:kv_cache_usage_perc") == 0
    assert served.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="131072") == 1
