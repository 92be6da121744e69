"""The whole gateway process in one event loop: ranks scraped, picks made, admin API answering, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from gateway.cli import main
from tests.builders_gateway import Gateway, running_gateway
from tests.builders_protocol import REQ, RESPONSE, in_modes
from tests.builders_ranks import StandInRank
from tests.hermetic.conftest import chat, whole_body

RunGateway = Callable[..., Any]


@pytest.fixture
def run_gateway(unused_tcp_port_factory: Callable[[], int]) -> RunGateway:
    """`async with run_gateway(endpoints) as gateway:` over one adopted group."""

    def run(
        endpoints: list[str], *, budget_tokens: int | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[Gateway]:
        group = {"name": "g0", "engine": "adopted", "model": "m", "endpoints": endpoints}
        groups = [{**group, "max_num_batched_tokens": budget_tokens}]
        return running_gateway(groups, unused_tcp_port_factory, settings)

    return run


async def test_status_shows_what_each_rank_reports(run_gateway: RunGateway) -> None:
    async with StandInRank(engine=0) as first, StandInRank(engine=1) as second:
        first.running, first.waiting, first.kv_cache_usage = 3, 2, 0.25
        async with run_gateway([first.endpoint, second.endpoint]) as gateway:
            status = await gateway.status()
            row = status["ranks"][0]
            assert 0 <= row.pop("report_age_s") < 5
            assert row == {
                "rank": "g0/0",
                "group": "g0",
                "index": 0,
                "endpoint": first.endpoint,
                "model": "m",
                "state": "fresh",
                "running": 3,
                "waiting": 2,
                "kv_cache_usage": 0.25,
                "wave": None,
                "adapters": [],
                "reservations": 0,
                "unobserved": 0,
                "queued": 0,
                "prefilling": 0,
                "decoding": 0,
                "picks": 0,
            }
            (group,) = status["groups"]
            assert (group["name"], group["engine"], group["healthy"]) == ("g0", "adopted", True)
            assert group["prefill_step_ms"] > group["decode_step_ms"] > 0
            assert group["step_time"]["fixed_ms"] == 20
            assert status["held"] == {"requests": 0, "tokens": 0}
            assert status["targets"] == {"ttft_ms": 2000, "tpot_ms": 100}


async def test_a_pick_shows_as_a_reservation_until_its_stream_ends(run_gateway: RunGateway) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        stream = gateway.client.open()
        reply = await gateway.client.exchange(stream, whole_body(chat()))
        destination = reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
        assert destination == rank.endpoint
        status = await gateway.status()
        assert (status["ranks"][0]["reservations"], status["ranks"][0]["picks"]) == (1, 1)
        await stream.done_writing()
        await gateway.until(lambda status: status["ranks"][0]["reservations"] == 0)


async def test_a_rank_that_stops_answering_takes_its_group_down_and_back(run_gateway: RunGateway) -> None:
    async with (
        StandInRank(engine=0) as kept,
        StandInRank(engine=1) as lost,
        run_gateway([kept.endpoint, lost.endpoint]) as gateway,
    ):
        lost.broken = True
        status = await gateway.until(lambda status: not status["groups"][0]["healthy"])
        assert [row["state"] for row in status["ranks"]] == ["fresh", "down"]
        lost.broken = False
        await gateway.until(lambda status: status["groups"][0]["healthy"])


async def test_a_gateway_starts_and_refuses_while_no_rank_answers(
    run_gateway: RunGateway, unused_tcp_port: int
) -> None:
    async with run_gateway([f"127.0.0.1:{unused_tcp_port}"]) as gateway:
        assert (await gateway.status())["ranks"][0]["state"] in ("unknown", "down")
        async with asyncio.timeout(10):
            while (await (await gateway.get("/groups/g0")).json())["in_rotation"]:
                await asyncio.sleep(0.01)
        reply = await gateway.client.exchange(gateway.client.open(), whole_body(chat()))
        assert reply.immediate_response.status.code == 503


async def test_metrics_name_picks_reservations_ages_and_states(run_gateway: RunGateway) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        await gateway.client.exchange(gateway.client.open(), whole_body(chat()))
        text = await (await gateway.get("/metrics")).text()
    for line in (
        'wavegate_picks_total{rank="g0/0",reason="policy"} 1.0',
        'wavegate_reservations{rank="g0/0"} 1.0',
        'wavegate_ranks{state="fresh"} 1.0',
        'wavegate_group_healthy{group="g0"} 1.0',
        "wavegate_pick_seconds_count 1.0",
        "wavegate_held_requests 0.0",
        "wavegate_held_prompt_tokens 0.0",
        "wavegate_sessions 0.0",
        'wavegate_group_prefilling{group="g0"} 1.0',
        'wavegate_budget_tokens{group="g0"} 2048.0',
        'wavegate_prefix_index_blocks{group="g0"} 0.0',
        'wavegate_token_prompts_total{group="g0",result="missing"} 0.0',
    ):
        assert line in text.splitlines()
    assert 'wavegate_report_age_seconds{rank="g0/0"}' in text
    assert 'wavegate_step_seconds{group="g0",kind="decode"} 0.02' in text
    assert 'wavegate_lead_tokens{group="g0"}' in text


async def test_no_metric_grows_with_what_clients_send(run_gateway: RunGateway) -> None:
    async def series(gateway: Gateway) -> set[str]:
        text = await (await gateway.get("/metrics")).text()
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async with StandInRank() as rank, run_gateway([rank.endpoint], sessions={"header": "x-chat"}) as gateway:
        await gateway.client.exchange(gateway.client.open(), whole_body(chat()))
        before = await series(gateway)
        for n in range(20):
            message = whole_body(chat(f"prompt {n}", model=f"model-{n}"), path=f"/v1/{n}", request_id=str(n))
            names = ("x-wavegate-priority", "x-wavegate-tenant", "x-chat")
            message.attributes["envoy.filters.http.ext_proc"].update(
                {f"request.headers['{name}']": str(n) for name in names}
            )
            await gateway.client.exchange(gateway.client.open(), message)
        after = await series(gateway)
        assert (await gateway.status())["sessions"] == 20
    assert after - before <= {
        'wavegate_picks_total{rank="g0/0",reason="session"}',
        'wavegate_picks_created{rank="g0/0",reason="session"}',
    }


async def test_metrics_count_responses_tokens_and_refusals_of_an_endpoint_picker(
    run_gateway: RunGateway,
) -> None:
    usage = b'{"usage":{"prompt_tokens":7,"completion_tokens":10}}'
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        for messages in ([*REQ(), *RESPONSE(usage)], REQ(b"no json")):
            stream = gateway.client.open()
            for message in messages:
                await stream.write(message)
            await stream.done_writing()
            while await stream.read() is not grpc.aio.EOF:
                pass
        lines = (await (await gateway.get("/metrics")).text()).splitlines()
    assert 'wavegate_responses_total{rank="g0/0",status="2xx"} 1.0' in lines
    assert 'wavegate_response_tokens_total{kind="prompt",rank="g0/0"} 7.0' in lines
    assert 'wavegate_response_tokens_total{kind="completion",rank="g0/0"} 10.0' in lines
    assert 'wavegate_refused_total{reason="malformed_body"} 1.0' in lines
    assert 'wavegate_unobserved_reservations{rank="g0/0"} 0.0' in lines


async def test_what_no_stream_observes_is_shown_until_the_rank_reports_its_end(
    run_gateway: RunGateway,
) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        rank.running = 1
        await gateway.until(lambda status: status["ranks"][0]["running"] == 1)
        stream = gateway.client.open()
        await gateway.client.exchange(stream, in_modes(REQ()[:1], request="NONE")[0])
        await stream.done_writing()
        await gateway.until(lambda status: status["ranks"][0]["unobserved"] == 1)
        assert (await gateway.status())["ranks"][0]["reservations"] == 1
        rank.running = 0
        await gateway.until(lambda status: status["ranks"][0]["unobserved"] == 0)
        assert (await gateway.status())["ranks"][0]["reservations"] == 0


async def test_what_would_be_decided_is_explained_and_nothing_is_reserved(run_gateway: RunGateway) -> None:
    async with (
        StandInRank(engine=0) as first,
        StandInRank(engine=1) as second,
        run_gateway([first.endpoint, second.endpoint]) as gateway,
    ):
        answer = await gateway.post("/explain", chat("hello " * 1000), {"x-wavegate-priority": "-4"})
        explained = await answer.json()
        embedding = await gateway.post("/explain?path=/v1/embeddings", b'{"model": "m", "input": "x"}')
        nonsense = await gateway.post("/explain", b"no json")
        status = await gateway.status()
    assert explained["request"]["prompt_tokens"] == 1500
    assert explained["request"]["priority"] == -4
    assert (explained["outcome"], explained["picked"][0], explained["reason"]) == ("place", "g0/0", "policy")
    assert [row["rank"] for row in explained["ranks"]] == ["g0/0", "g0/1"]
    for row in explained["ranks"]:
        assert row["cost"] == pytest.approx(sum(row["parts"].values()))
        assert (row["readiness"], row["cached_tokens"]) == ("ready", 0)
    assert (await embedding.json())["request"]["kind"] == "embedding"
    assert (await nonsense.json())["request"]["model"] is None
    assert explained["notes"] == []
    assert [(row["reservations"], row["picks"]) for row in status["ranks"]] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("body", "priority", "note"),
    [
        (b"no json", "1", "the body is not a JSON object: a rank of m gets it, "),
        (b'{"prompt": "x"}', "1", "the body names no model: a rank of m gets it, "),
        (b'{"model": "x"}', "1", "no group is known to serve 'x': a rank of m gets it, and answers it"),
        (b'{"model": "m"}', "high", "x-wavegate-priority is ignored, "),
    ],
)
async def test_what_a_person_may_not_have_meant_is_explained_with_what_becomes_of_it(
    run_gateway: RunGateway, body: bytes, priority: str, note: str
) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        answer = await gateway.post("/explain", body, {"x-wavegate-priority": priority})
        (told,) = (await answer.json())["notes"]
    assert told.startswith(note)


async def test_a_path_that_is_none_is_answered_with_those_there_are(run_gateway: RunGateway) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        lost, unknown_group = await gateway.get("/explian"), await gateway.get("/groups/g7")
        assert (lost.status, unknown_group.status) == (404, 404)
        assert {"GET /status", "POST /explain", "PUT /groups/{name}/rotation"} <= set(
            (await lost.text()).splitlines()
        )
        assert await unknown_group.text() == "there is no group 'g7'\n"
        assert (await gateway.get("/explain")).status == 405


async def test_an_explanation_takes_no_body_larger_than_a_request_may_have(run_gateway: RunGateway) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        assert (await gateway.post("/explain", b"x" * (100 << 10))).status == 200
        assert (await gateway.post("/explain", b"x" * ((16 << 20) + 1))).status == 413


async def test_decisions_are_logged_only_where_the_configuration_says_so(
    run_gateway: RunGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for log_decisions, lines in ((False, 0), (True, 1)):
        async with (
            StandInRank() as rank,
            run_gateway([rank.endpoint], log_decisions=log_decisions) as gateway,
        ):
            await gateway.client.exchange(gateway.client.open(), whole_body(chat(), request_id="id-7"))
        written = [one.message for one in caplog.records if "id-7" in one.message]
        assert len(written) == lines
    assert "rank=g0/0 reason=policy held_ms=0; g0/0 " in written[0]


async def test_stopping_waits_for_requests_under_way(run_gateway: RunGateway) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as gateway:
        stream = gateway.client.open()
        await gateway.client.exchange(stream, whole_body(chat()))
        gateway.stop.set()
        async with asyncio.timeout(10):
            while (await gateway.get("/readyz")).status != 503:
                await asyncio.sleep(0.01)
        assert (await gateway.status())["ranks"][0]["reservations"] == 1
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_taken_admin_port_is_named(run_gateway: RunGateway) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint]) as first:
        port = first.admin_url.rpartition(":")[2]
        with pytest.raises(OSError, match=port):
            async with run_gateway([rank.endpoint], admin_port=int(port)):
                pass


@pytest.mark.parametrize("budget_tokens", [None, 2048])
async def test_advice_is_given_by_what_a_running_gateway_has_learned(
    run_gateway: RunGateway, budget_tokens: int | None
) -> None:
    async with StandInRank() as rank, run_gateway([rank.endpoint], budget_tokens=budget_tokens) as gateway:
        options = ["tune", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "100", "--admin", gateway.admin_url]
        shown = await asyncio.to_thread(CliRunner().invoke, main, options)
        elsewhere = await asyncio.to_thread(CliRunner().invoke, main, [*options, "--group", "g7"])
    assert shown.exit_code == 0
    advice = " ".join(shown.stdout.split())
    assert shown.stderr == ""
    assert "g0: its step times are hardly learned yet" in advice
    assert "g0: nothing decodes just now, so the table assumes that nothing will; " in advice
    assert "Best: --max-num-batched-tokens 896" in advice
    assert ("g0: the token budget that its engines have is neither told nor" in advice) == (not budget_tokens)
    compared = "Expected against 2048 now: 92 instead of 184 ms between tokens" in advice
    assert compared == (budget_tokens is not None)
    assert elsewhere.exit_code == 2
    assert "there is no group 'g7'; there are: g0" in elsewhere.output
