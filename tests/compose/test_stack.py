"""docker-compose.yml as its user sees it, in the order of this file: up, service, failures, stop, down."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.builders_docker import ROOT, CommandFailed, archive
from tests.builders_stack import RANKS, SERVICES, VLLM_MODEL, Container, Say, Stack, with_stand_ins_for_vllm
from tests.builders_traffic import traffic

MODEL = "wavegate-embedded"
RANK_NAMES = {"g0/0", "g0/1", "g0/2", "g0/3"}
LONG_ANSWER_TOKENS = 300
REFUSED_BY_THE_GATEWAY = "HTTP 503 no_rank"

pytestmark = pytest.mark.timeout(900)


async def test_everything_becomes_healthy(stack: Stack) -> None:
    await stack.until_healthy(*SERVICES)


def test_the_curl_command_of_the_readme_is_answered(stack: Stack) -> None:
    section = (ROOT / "README.md").read_text().partition("docker compose up")[2]
    found = re.search(r"^curl (?:.*\\\n)*.*", section, re.MULTILINE)
    assert found is not None
    command = found[0].replace("localhost:8080", f"localhost:{stack.port}")
    answered = subprocess.run(["sh", "-c", f"{command} --silent"], capture_output=True, check=True)
    assert json.loads(answered.stdout)["choices"][0]["message"]["content"]


def test_the_test_profile_drives_every_rank(stack: Stack, say: Say) -> None:
    *_, last = stack.compose("run", "--rm", "test").strip().splitlines()
    say(f"test profile: {last}")
    assert "32 of 32 requests answered" in last
    assert set(re.findall(r"g0/\d", last)) == RANK_NAMES


def test_nothing_but_envoy_is_published_and_that_on_loopback(stack: Stack) -> None:
    published = {
        service: container.facts["NetworkSettings"]["Ports"]
        for service, container in stack.containers().items()
        if container.facts["NetworkSettings"]["Ports"]
    }
    assert published == {"envoy": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]}}


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_can_change_itself(stack: Stack, service: str) -> None:
    container = stack.containers()[service].facts
    assert container["HostConfig"]["ReadonlyRootfs"]
    script = "id -u; grep CapBnd /proc/self/status; touch /etc/something 2>&1 || true"
    user, capabilities, refusal = stack.docker("exec", container["Id"], "sh", "-c", script).splitlines()
    assert user == "10001"
    assert capabilities.split() == ["CapBnd:", "0000000000000000"]
    assert "Read-only file system" in refusal


def test_envoy_can_come_from_another_image(stack: Stack, base_image: str, tmp_path: Path) -> None:
    envoy_image = f"{stack.name}:envoy"
    stand_in = archive({"usr/local/bin/envoy": b"#!/bin/sh\necho the other one\n"}, mode=0o755)
    stack.docker("import", "-", envoy_image, stdin=stand_in)
    built = Stack(stack.docker, tmp_path, base_image, envoy_image=envoy_image)
    try:
        built.compose("build", "rank-0")
        answer = stack.docker("run", "--rm", "--network", "none", built.image, "envoy", "--version")
    finally:
        built.remove_image()
        stack.docker("rmi", envoy_image)
    assert answer == "the other one\n"


@pytest.mark.parametrize("command", ["envoy", "gateway"])
def test_a_faulty_configuration_is_explained(stack: Stack, command: str) -> None:
    faulty = "groups: [{engine: adopted, name: g0, modle: m, endpoints: ['10.0.0.1:8000']}]"
    with pytest.raises(CommandFailed, match="modle: is not a key here; did you mean model"):
        stack.compose(
            "run", "--rm", "--no-deps", "-T", "-e", f"WAVEGATE_YAML={faulty}", "test", "wavegate", command
        )


async def test_a_group_that_loses_a_rank_restarts_whole(stack: Stack, say: Say) -> None:
    before = stack.containers()
    async with traffic(stack.url, MODEL) as seen:
        await seen.answers_after(seen.mark("everything runs"))
        seen.mark("the main process of rank-2 is killed")
        await asyncio.to_thread(stack.execute, "rank-2", "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
        await stack.until(lambda now: all(now[rank].restarts > before[rank].restarts for rank in RANKS))
        await stack.until_healthy(*RANKS)
        await seen.answers_after(seen.mark("all four ranks have restarted and are healthy"))
    say(seen.report("a rank crashes"))
    after = stack.containers()
    assert [after[service].restarts for service in ("envoy", "gateway")] == [0, 0]


async def test_a_stopped_rank_stops_its_group_until_it_is_started(stack: Stack, say: Say) -> None:
    async with traffic(stack.url, MODEL) as seen:
        await seen.answers_after(seen.mark("everything runs"))
        stopped_s = seen.mark("docker compose stop rank-2")
        await asyncio.to_thread(stack.compose, "stop", "rank-2")
        await stack.until(lambda now: all(now[rank].health != "healthy" for rank in RANKS))
        seen.mark("docker compose start rank-2")
        await asyncio.to_thread(stack.compose, "start", "rank-2")
        await stack.until_healthy(*RANKS)
        await seen.answers_after(seen.mark("all four ranks are healthy"))
    say(seen.report("a rank is stopped, and started"))
    assert all(failure.ended_s > stopped_s for failure in seen.failures())


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_without_the_gateway_no_request_fails(stack: Stack, say: Say, end: str) -> None:
    async with traffic(stack.url, MODEL) as seen:
        await seen.answers_after(seen.mark("everything runs"))
        seen.mark(f"docker compose {end} gateway")
        await asyncio.to_thread(stack.compose, end, "gateway")
        stopped_s = seen.mark("it has ended")
        await seen.answers_after(stopped_s, 20)
        started_s = seen.mark("docker compose start gateway")
        await asyncio.to_thread(stack.compose, "start", "gateway")
        await stack.until_healthy("gateway")
        await seen.answers_after(seen.mark("it is healthy"), 20)
    say(seen.report(f"the gateway ends by {end}, and is started"))
    away = [failure for failure in seen.failures() if stopped_s < failure.started_s < started_s]
    assert away == []
    # On a machine that is too busy the gateway takes ranks for hung, and refuses requests while it is there.
    assert {failure.outcome for failure in seen.failures()} <= {REFUSED_BY_THE_GATEWAY}
    status = json.loads(stack.execute("gateway", "wavegate", "status", "--json"))
    assert sum(rank["picks"] for rank in status["ranks"]) > 0


async def test_stop_lets_requests_under_way_end(stack: Stack, say: Say) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt="Tell me all",
            max_tokens=LONG_ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [await anext(stream)]
        started_s = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(stack.compose, "stop"))
        chunks += [chunk async for chunk in stream]
        ended_s = time.monotonic()
        await stopping
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == LONG_ANSWER_TOKENS
    say(
        f"docker compose stop: the answer under way came whole, {ended_s - started_s:.1f} s later; "
        f"stopped after {time.monotonic() - started_s:.1f} s"
    )
    containers = stack.containers()
    assert {service: exit_code(containers[service]) for service in ("envoy", "gateway")} == {
        "envoy": 0,
        "gateway": 0,
    }
    ends = [containers[service].facts["State"]["FinishedAt"] for service in ("envoy", "gateway")]
    ends.append(min(containers[rank].facts["State"]["FinishedAt"] for rank in RANKS))
    assert ends == sorted(ends)


def exit_code(container: Container) -> int:
    """How it ended; 137 if it had to be killed."""
    return int(container.facts["State"]["ExitCode"])


async def test_the_vllm_profile_serves_with_stand_ins_for_its_ranks(
    stack: Stack, base_image: str, tmp_path: Path, say: Say
) -> None:
    pool = Stack(
        stack.docker,
        tmp_path,
        base_image,
        file=with_stand_ins_for_vllm(tmp_path),
        profile="vllm",
        image=stack.image,
    )
    try:
        await asyncio.to_thread(pool.compose, "up", "-d", "vllm-envoy")
        await pool.until_healthy("vllm-envoy")
        async with traffic(pool.url, VLLM_MODEL) as seen:
            await seen.answers_after(seen.mark("up"), 30)
    finally:
        pool.compose("down")
    answered = {str(sent.rank) for sent in seen.sent}
    say(f"vllm profile, with embedded ranks for those of vLLM: {', '.join(sorted(answered))} have answered")
    assert answered == {"vllm/0", "vllm/1", "vllm/2", "vllm/3"}
    assert pool.leftovers() == []


async def test_a_stopped_stack_comes_back(stack: Stack) -> None:
    await asyncio.to_thread(stack.compose, "up", "-d")
    await stack.until_healthy(*SERVICES)
    async with traffic(stack.url, MODEL) as seen:
        await seen.answers_after(seen.mark("up again"))


def test_down_leaves_nothing(stack: Stack) -> None:
    stack.compose("down")
    assert stack.leftovers() == []
