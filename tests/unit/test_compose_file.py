"""What docker-compose.yml and Dockerfile must say; that it works is shown by tests/compose."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from gateway.config import Config
from gateway.config_file import parse
from vllm_ranks.launcher.command import GroupLaunch, RankPlace, rank_commands

ROOT = Path(__file__).parents[2]
POOLS = {"": "rank", "vllm-": "vllm-rank"}
"""Prefix of the services of a pool: what its ranks are called."""
RANKS = range(4)


def compose_file(**variables: str) -> Any:
    """docker-compose.yml with its variables replaced, as Compose does it."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["name"], match["default"])

    text = (ROOT / "docker-compose.yml").read_text()
    return yaml.safe_load(re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", value, text))


def service(name: str, **variables: str) -> Any:
    """One service."""
    return compose_file(**variables)["services"][name]


def configuration(service_name: str, **variables: str) -> Config:
    """The wavegate configuration that a service gets."""
    return parse(service(service_name, **variables)["environment"]["WAVEGATE_YAML"], service_name)


def address(service_name: str, **variables: str) -> str:
    """The fixed address of a service."""
    return str(service(service_name, **variables)["networks"]["default"]["ipv4_address"])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("network", ["10.213.87", "192.168.7"])
def test_the_configuration_names_the_addresses_of_the_containers(pool: str, network: str) -> None:
    config = configuration(f"{pool}gateway", WAVEGATE_NETWORK=network)
    ranks = [address(f"{POOLS[pool]}-{rank}", WAVEGATE_NETWORK=network) for rank in RANKS]
    gateway = address(f"{pool}gateway", WAVEGATE_NETWORK=network)
    assert all(place.startswith(f"{network}.") for place in [*ranks, gateway])
    assert [rank.endpoint for rank in config.ranks()] == [f"{place}:8000" for place in ranks]
    assert config.gateway.ext_proc_listen == f"{gateway}:9002"


def test_no_two_containers_share_an_address() -> None:
    services = compose_file()["services"]
    addresses = [address(name) for name, content in services.items() if "networks" in content]
    assert len(set(addresses)) == len(addresses) == 10


@pytest.mark.parametrize("pool", POOLS)
def test_envoy_is_configured_as_its_gateway_is(pool: str) -> None:
    assert configuration(f"{pool}envoy") == configuration(f"{pool}gateway")


@pytest.mark.parametrize("pool", POOLS)
def test_docker_waits_for_the_drain(pool: str) -> None:
    drain_timeout_s = configuration(f"{pool}envoy").gateway.drain_timeout_s
    for name in (f"{pool}envoy", f"{pool}gateway"):
        grace_s = int(service(name)["stop_grace_period"].removesuffix("s"))
        assert grace_s > drain_timeout_s + 5


def test_vllm_ranks_are_started_as_wavegate_would_start_them() -> None:
    model = configuration("vllm-gateway").groups[0].model
    places = tuple(RankPlace(rank, 0, "0.0.0.0", 8000, ()) for rank in RANKS)
    launch = GroupLaunch(
        executable="vllm",
        model=model,
        served_model_name=model,
        places=places,
        address=address("vllm-rank-0"),
        rpc_port=29550,
        args=("--enable-expert-parallel",),
    )
    for rank, expected in enumerate(rank_commands(launch)):
        content = service(f"vllm-rank-{rank}")
        assert (*content["entrypoint"], *shlex.split(content["command"])) == expected.command


def test_each_vllm_rank_has_a_gpu_of_its_own() -> None:
    devices = [
        service(f"vllm-rank-{rank}")["deploy"]["resources"]["reservations"]["devices"] for rank in RANKS
    ]
    assert [(one["driver"], one["device_ids"], one["capabilities"]) for (one,) in devices] == [
        ("nvidia", [str(rank)], ["gpu"]) for rank in RANKS
    ]


def test_vllm_is_the_version_that_is_tested() -> None:
    tested = re.search(r"^VLLM_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested is not None
    assert service("vllm-rank-0")["image"] == f"vllm/vllm-openai:v{tested[1]}"


def test_defaults_of_the_build_are_those_of_the_dockerfile() -> None:
    declared = re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert service("rank-0")["build"]["args"] == dict(declared)


def test_one_service_builds_the_image() -> None:
    assert [name for name, content in compose_file()["services"].items() if "build" in content] == ["rank-0"]


def test_the_image_holds_versions_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["demo"])
    ]
    lines = (ROOT / "docker" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    for requirement in asked:
        assert requirement.specifier.contains(versions[requirement.name.lower()]), str(requirement)
