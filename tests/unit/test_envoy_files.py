"""The configurations in `envoy/` are what `wavegate envoy-config` prints."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gateway.cli import main
from gateway.envoy_parts import Part
from gateway.envoy_process import locate, validate
from tests.builders_envoy_files import BY_HAND, ENVOY, SAMPLES

PARTS = {f"{part.value}.yaml" for part in Part}


def printed(*arguments: str) -> str:
    """What `wavegate envoy-config` prints."""
    result = CliRunner().invoke(main, ["envoy-config", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("name", "sample"), SAMPLES.items())
def test_a_configuration_is_what_its_sample_asks_for(name: str, sample: str) -> None:
    """After a change: `wavegate envoy-config -c envoy/samples/SAMPLE > envoy/NAME`."""
    assert (ENVOY / name).read_text() == printed("-c", str(ENVOY / "samples" / sample))


@pytest.mark.parametrize("part", Part)
def test_a_snippet_is_a_part_of_the_first_of_them(part: Part) -> None:
    """After a change: `wavegate envoy-config -c envoy/samples/one-message.yaml --part PART > …`."""
    snippet = (ENVOY / "snippets" / f"{part.value}.yaml").read_text()
    assert snippet == printed("-c", str(ENVOY / "samples" / "one-message.yaml"), "--part", part.value)


@pytest.mark.parametrize("name", SAMPLES)
def test_envoy_accepts_each(name: str) -> None:
    validate(locate(None), (ENVOY / name).read_text())


def test_no_file_is_left_out_here() -> None:
    assert {path.name for path in ENVOY.glob("*.yaml")} == set(SAMPLES)
    assert {path.name for path in (ENVOY / "samples").iterdir()} == set(SAMPLES.values())
    assert {path.name for path in (ENVOY / "snippets").iterdir()} == PARTS | BY_HAND
    assert not list(ENVOY.rglob("__init__.py"))
