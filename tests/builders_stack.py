"""The stack of docker-compose.yml under a name, an image, a port and a network of its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.builders_docker import ROOT, Docker, NoDocker
from tests.builders_ports import free_port

COMPOSE_FILE = ROOT / "docker-compose.yml"
VLLM_MODEL = "some/model"
RANKS = ("rank-0", "rank-1", "rank-2", "rank-3")
SERVICES = ("envoy", "gateway", *RANKS)
Say = Callable[[str], None]
"""Prints a line for whoever runs the tests."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def compose_command() -> tuple[str, ...]:
    """`docker compose` where there is one, else `docker-compose`; $COMPOSE names another. Raises NoDocker."""
    if named := os.environ.get("COMPOSE"):
        return tuple(shlex.split(named))
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose") is None:
        raise NoDocker("there is neither `docker compose` nor docker-compose here")
    return ("docker-compose",)


@dataclass(frozen=True, slots=True)
class Container:
    """What the daemon says of one container of the stack."""

    service: str
    facts: dict[str, Any]

    @property
    def is_running(self) -> bool:
        return bool(self.facts["State"]["Running"])

    @property
    def health(self) -> str:
        return str(self.facts["State"].get("Health", {}).get("Status"))

    @property
    def restarts(self) -> int:
        return int(self.facts["RestartCount"])


class Stack:
    """One Compose project, up or not."""

    def __init__(
        self,
        docker: Docker,
        folder: Path,
        base_image: str,
        *,
        file: Path = COMPOSE_FILE,
        profile: str | None = None,
        image: str | None = None,
        envoy_image: str | None = None,
    ) -> None:
        """`folder`: for a file that tells Compose how to build on this machine. `image`: not to be built."""
        self.docker = docker
        self.name = f"wavegate-test-{random.randrange(16**6):06x}"
        self.image = image or f"{self.name}:built"
        self.port = free_port()
        self._environment = {
            "BASE_IMAGE": base_image,
            "WAVEGATE_IMAGE": self.image,
            "WAVEGATE_NETWORK": f"10.{random.randrange(200, 250)}.{random.randrange(250)}",
            "WAVEGATE_PORT": str(self.port),
            "WAVEGATE_VLLM_PORT": str(self.port),
            "VLLM_MODEL": VLLM_MODEL,
            **({} if envoy_image is None else {"ENVOY_IMAGE": envoy_image}),
        }
        build = folder / "build.yml"
        build.write_text(yaml.safe_dump({"services": {"rank-0": {"build": _build_here()}}}))
        self._command = [*compose_command(), "-p", self.name, "--project-directory", str(ROOT)]
        self._command += ["-f", str(file), "-f", str(build), *(["--profile", profile] if profile else [])]

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://localhost:{self.port}"

    def compose(self, *arguments: str) -> str:
        """`docker compose <arguments>`; what it writes to stdout. Raises CommandFailed."""
        return self.docker.run((*self._command, *arguments), environment=self._environment)

    def execute(self, service: str, *command: str) -> str:
        """Run a command in a running container."""
        return self.compose("exec", "-T", service, *command)

    def containers(self) -> dict[str, Container]:
        """All containers of the stack, by service, stopped ones too."""
        ids = self.docker("ps", "--all", "--quiet", "--filter", self._label).split()
        facts = json.loads(self.docker("inspect", *ids)) if ids else []
        found = [Container(entry["Config"]["Labels"]["com.docker.compose.service"], entry) for entry in facts]
        return {container.service: container for container in found}

    async def until(
        self, condition: Callable[[dict[str, Container]], bool], *, within_s: float = 90.0
    ) -> None:
        """Return as soon as the containers are as they should be."""
        async with asyncio.timeout(within_s):
            while not condition(await asyncio.to_thread(self.containers)):
                await asyncio.sleep(0.3)

    async def until_healthy(self, *services: str) -> None:
        """Return as soon as these services are healthy."""
        await self.until(lambda found: all(found[service].health == "healthy" for service in services))

    def leftovers(self) -> list[str]:
        """What the daemon still has of the stack: containers, networks, volumes."""
        return [
            line
            for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
            for line in self.docker(*kind, "--quiet", "--filter", self._label).splitlines()
        ]

    @property
    def _label(self) -> str:
        return f"label=com.docker.compose.project={self.name}"

    def logs(self, service: str, lines: int) -> str:
        """What a service has written last."""
        return self.compose("logs", "--no-color", "--tail", str(lines), service)

    def remove_image(self) -> None:
        """Remove the image that was built, and what the stages of its build left behind."""
        if self.docker("image", "ls", "--quiet", self.image).strip():
            self.docker("rmi", self.image)
        self.docker("image", "prune", "--force", "--filter", "label=org.opencontainers.image.title=wavegate")


def _build_here() -> dict[str, Any]:
    """How images are built on this machine: its package index may be reachable from itself only."""
    proxies = {key: os.environ[key] for key in (*PROXIES, *map(str.lower, PROXIES)) if key in os.environ}
    return {"network": "host", "args": proxies}


def with_stand_ins_for_vllm(folder: Path) -> Path:
    """docker-compose.yml, but vLLM ranks are embedded ones: there is no GPU here, and no image of vLLM."""
    content = yaml.safe_load(COMPOSE_FILE.read_text())
    for name, service in content["services"].items():
        if name.startswith("vllm-rank-"):
            service["image"] = content["services"]["rank-0"]["image"]
            service["entrypoint"] = ["wavegate", "rank", "--model"]
            service["command"] = service["command"].removesuffix("--enable-expert-parallel")
            for key in ("deploy", "volumes", "ipc"):
                del service[key]
    path = folder / "docker-compose.yml"
    path.write_text(yaml.safe_dump(content))
    return path
