"""A policy that another package brings, by an entry point: it is used, or what is wrong with it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ext_proc.policies import make_policy, policy_names
from gateway.cli import main

CODE = """
from ext_proc.policy import ScorePolicy

class Mine(ScorePolicy):
    name = "mine"

    def costs(self, view):
        return [0.0 for _ in view.accounts]

class Bare:
    name = "mine"

    def costs(self, view):
        return [0.0 for _ in view.accounts]

class Failing(Mine):
    def __init__(self):
        raise RuntimeError("no table\\nof costs")
"""

Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with a policy `mine`; returns a configuration that asks for it."""

    def install_as(value: str) -> Path:
        package = tmp_path / "mine_package-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-package\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(f"[wavegate.policies]\nmine = {value}\n")
        (tmp_path / f"{tmp_path.name}.py").write_text(CODE)
        monkeypatch.syspath_prepend(tmp_path)
        config = tmp_path / "wavegate.yaml"
        config.write_text("groups: [{engine: embedded, name: g0}]\ngateway:\n  policy: mine\n")
        return config

    return install_as


def complaint(*command: str, config: Path) -> str:
    """What a command says of a configuration that it refuses."""
    refused = CliRunner().invoke(main, [*command, "-c", str(config)])
    assert refused.exit_code == 2
    heading, line = refused.stderr.splitlines()
    assert heading.endswith("wavegate.yaml: 1 problem")
    return line.strip()


def test_a_policy_of_ones_own_can_be_asked_for(install: Install, tmp_path: Path) -> None:
    config = install(f"{tmp_path.name}:Mine")
    assert "mine" in policy_names()
    assert not make_policy("mine").holds
    assert CliRunner().invoke(main, ["config", "check", "-c", str(config)]).exit_code == 0


@pytest.mark.parametrize("command", [("config", "check"), ("gateway",)])
def test_a_module_that_is_not_there_is_told_before_anything_starts(
    install: Install, command: tuple[str, ...]
) -> None:
    assert complaint(*command, config=install("no_such_module:Mine")) == (
        "line 3: gateway.policy: mine is no_such_module:Mine of the package mine-package, which cannot be "
        "made (ModuleNotFoundError: No module named 'no_such_module'); correct that package's entry point in "
        "the group wavegate.policies, or what it names"
    )


def test_a_class_that_fails_is_told_with_its_error(install: Install, tmp_path: Path) -> None:
    config = install(f"{tmp_path.name}:Failing")
    assert "which cannot be made (RuntimeError: no table of costs)" in complaint(
        "config", "check", config=config
    )


@pytest.mark.parametrize("command", [("config", "check"), ("gateway",)])
def test_a_class_that_is_no_policy_is_told_with_what_it_lacks(
    install: Install, tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert complaint(*command, config=install(f"{tmp_path.name}:Bare")) == (
        f"line 3: gateway.policy: mine is {tmp_path.name}:Bare of the package mine-package, which lacks "
        "holds (true or false), in_seconds (true or false), explain(view); derive the class from "
        "ext_proc.policy.ScorePolicy, which leaves costs(view) to be written, or give it all of "
        "ext_proc.policy.Policy"
    )
