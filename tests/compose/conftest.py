"""Fixtures of the Compose tests: one stack for all of them, taken down at the end with all that it needed."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack

import pytest

from tests.builders_base_image import make_base_image
from tests.builders_docker import Docker, NoDocker, running_docker
from tests.builders_stack import SERVICES, Say, Stack, compose_command

BASE_IMAGE = "wavegate-test:base"
SHOWN_LOG_LINES = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the containers wrote last."""
    report = yield
    if report.when == "call" and report.failed and "stack" in item.funcargs:
        stack = item.funcargs["stack"]
        report.sections += [
            (f"log of {service}", stack.logs(service, SHOWN_LOG_LINES)) for service in SERVICES
        ]
    return report


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Say:
    """Prints for whoever runs the tests, also when they pass: what clients saw is the point of them."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    started_s = time.monotonic()

    def print_now(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{time.monotonic() - started_s:5.0f} s  {text}", end="", flush=True)

    return print_now


@pytest.fixture(scope="session")
def docker(say: Say) -> Iterator[Docker]:
    """A Docker daemon. Where none runs and none can be started, the tests are skipped, and say so."""
    with ExitStack() as parts:
        try:
            daemon = parts.enter_context(running_docker())
            command = compose_command()
        except NoDocker as error:
            say(f"SKIPPED: the tests of docker compose, because {error}")
            pytest.skip("there is no Docker daemon here: see above")
        server = daemon("version", "--format", "{{.Server.Version}}").strip()
        version = daemon.run([*command, "version", "--short"]).strip()
        say(f"Docker {server}, {' '.join(command)} {version}")
        yield daemon
    say("Docker is as it was")


@pytest.fixture(scope="session")
def base_image(docker: Docker, say: Say) -> Iterator[str]:
    """What the image is built on."""
    say(f"base image: {make_base_image(docker, BASE_IMAGE)}")
    yield BASE_IMAGE
    docker("rmi", BASE_IMAGE)


@pytest.fixture(scope="session")
def stack(
    docker: Docker, base_image: str, say: Say, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The stack, built and up, as a user gets it with `docker compose up -d`."""
    stack = Stack(docker, tmp_path_factory.mktemp("compose"), base_image)
    try:
        stack.compose("up", "-d")
        say("up")
        yield stack
    finally:
        stack.compose("down", "--volumes")
        stack.remove_image()
