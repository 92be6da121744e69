"""What `wavegate doctor` says of a machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import main
from gateway.config import Config
from gateway.config_groups import VllmGroup
from gateway.doctor import Finding, Level, Reachability, examine


@dataclass
class StandInMachine:
    """A machine on which everything is fine, unless a test says otherwise."""

    platform: str = "linux"
    open_files_limit: int = 1_000_000
    version: str | None = "0.32.0"
    executable: Path | None = Path("/venv/bin/vllm")
    gpus: int | None = 8
    taken: list[str] = field(default_factory=list)
    reached: Reachability = Reachability.REFUSED
    folders: dict[str, list[str]] = field(default_factory=dict)
    is_cached: bool = True
    shm_bytes: int = 8 << 30
    envoy: str | None = None

    def find_executable(self, name: str) -> Path | None:
        return self.executable

    def vllm_version(self, executable: Path) -> str | None:
        return self.version

    def gpu_count(self) -> int | None:
        return self.gpus

    def port_problems(self, node: int | None) -> list[str]:
        return self.taken

    def reach(self, host: str, port: int) -> Reachability:
        return self.reached

    def files_in(self, folder: Path) -> list[str] | None:
        return self.folders.get(str(folder))

    def cached_model(self, model: str, group: VllmGroup) -> Path | None:
        return Path("/cache") if self.is_cached else None

    def free_bytes(self, path: Path) -> int | None:
        return self.shm_bytes

    def envoy_problem(self) -> str | None:
        return self.envoy


def findings(machine: StandInMachine, *groups: dict[str, Any], node: int | None = None) -> list[Finding]:
    """What is said; groups are of a MoE model over two GPUs unless they say otherwise."""
    defaults: dict[str, Any] = {"engine": "vllm", "model": "org/moe", "moe": True, "data_parallel_size": 2}
    config = Config.model_validate(
        {
            "groups": [
                {
                    **defaults,
                    "name": f"g{n}",
                    "port": 8100 + 10 * n,
                    "data_parallel_rpc_port": 29550 + n,
                    **group,
                }
                for n, group in enumerate(groups or ({},))
            ]
        }
    )
    return examine(config, node, machine)


def worst(machine: StandInMachine, *groups: dict[str, Any], node: int | None = None) -> Finding:
    """The one finding that is not fine."""
    (finding,) = (f for f in findings(machine, *groups, node=node) if f.level is not Level.FINE)
    return finding


def test_where_everything_is_there_all_is_fine() -> None:
    found = findings(StandInMachine())
    assert {finding.level for finding in found} == {Level.FINE}
    subjects = [finding.subject for finding in found]
    assert subjects == ["vLLM", "GPUs", "model", "ports", "shared memory", "open files", "Envoy"]


def test_a_missing_vllm_is_a_problem_with_a_remedy() -> None:
    finding = worst(StandInMachine(executable=None))
    assert (finding.level, finding.text) == (Level.PROBLEM, "there is no command vllm")
    assert "groups[0].executable" in finding.remedy


@pytest.mark.parametrize(
    ("version", "level"), [("0.32.0+cpu", Level.FINE), ("0.31.0", Level.ADVICE), ("0.320", Level.ADVICE)]
)
def test_other_versions_of_vllm_are_advised_against(version: str, level: Level) -> None:
    assert findings(StandInMachine(version=version))[0].level is level


def test_too_few_gpus_are_a_problem() -> None:
    finding = worst(StandInMachine(gpus=3), {"tensor_parallel_size": 2})
    assert (finding.level, finding.subject) == (Level.PROBLEM, "GPUs")
    assert finding.text.startswith("3 found, 4 needed")


def test_no_driver_is_a_problem_unless_ranks_run_on_cpus() -> None:
    assert worst(StandInMachine(gpus=None)).remedy.endswith("write devices: [] (groups[0])")
    assert all(f.level is Level.FINE for f in findings(StandInMachine(gpus=None), {"devices": []}))


def test_groups_that_would_share_devices_are_a_problem() -> None:
    assert worst(StandInMachine(), {}, {}).text.startswith("several groups count their devices from 0")
    shared_out = ({"devices": [0, 1]}, {"devices": [2, 3]})
    assert all(f.level is Level.FINE for f in findings(StandInMachine(), *shared_out))


def test_a_model_that_must_be_downloaded_is_an_advice_or_offline_a_problem() -> None:
    machine = StandInMachine(is_cached=False)
    assert worst(machine).level is Level.ADVICE
    assert worst(machine, {"env": {"HF_HUB_OFFLINE": "1"}}).level is Level.PROBLEM


@pytest.mark.parametrize(
    ("files", "args", "text"),
    [
        (None, [], "there is no such folder"),
        (["README.md"], [], "it has no config.json"),
        (["config.json"], [], "has a config.json but no weights"),
        (["config.json", "model-1-of-1.safetensors"], [], None),
        (["config.json"], ["--load-format=dummy"], None),
        (["config.json"], ["--load-format", "dummy"], None),
    ],
)
def test_a_models_folder_must_be_complete(files: list[str] | None, args: list[str], text: str | None) -> None:
    machine = StandInMachine(folders={} if files is None else {"/models/moe": files})
    found = findings(machine, {"model_path": "/models/moe", "args": args})
    (finding,) = (f for f in found if f.subject == "model")
    assert finding.level is (Level.FINE if text is None else Level.PROBLEM)
    assert text is None or text in finding.text


def test_a_model_of_unknown_kind_is_a_problem_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wavegate.yaml").write_text(
        "groups: [{engine: vllm, name: a, model: org/unheard-of, data_parallel_size: 2, executable: no-vllm}]"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    shown = CliRunner().invoke(main, ["doctor", "-c", str(tmp_path / "wavegate.yaml")])
    assert shown.exit_code == 1
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    question = lines.index(
        "✗ groups[0].moe: whether org/unheard-of is a mixture of experts cannot be told, for its config.json "
        "is not on this machine"
    )
    assert lines[question + 1] == "write moe: true or moe: false"
    subjects = {line.split()[1] for line in lines if line[:1] in "✓!✗"}
    assert {"vLLM:", "GPUs:", "model:", "open", "Envoy:"} <= subjects


def test_taken_ports_are_problems() -> None:
    assert worst(StandInMachine(taken=["port 8100 is taken"])).text == "port 8100 is taken"


@pytest.mark.parametrize(
    ("reached", "level"),
    [
        (Reachability.LISTENS, Level.FINE),
        (Reachability.REFUSED, Level.FINE),
        (Reachability.UNREACHABLE, Level.PROBLEM),
    ],
)
def test_other_machines_must_reach_rank_0(reached: Reachability, level: Level) -> None:
    spread = {"ranks": ["10.0.0.1", "10.0.0.2"]}
    found = findings(StandInMachine(reached=reached), spread, node=1)
    (finding,) = (f for f in found if f.subject == "rank 0")
    assert finding.level is level
    assert "10.0.0.1 port 29550" in finding.text


def test_rank_0s_own_machine_need_not() -> None:
    spread = {"ranks": ["10.0.0.1", "10.0.0.2"]}
    machine = StandInMachine(reached=Reachability.UNREACHABLE)
    assert all(f.level is Level.FINE for f in findings(machine, spread, node=0))


def test_little_shared_memory_and_few_files_are_advice() -> None:
    assert worst(StandInMachine(shm_bytes=64 << 20)).remedy.startswith("in a container: --ipc=host")
    assert worst(StandInMachine(open_files_limit=1024)).remedy.startswith("ulimit -n")


def test_envoy_is_looked_at_where_it_runs() -> None:
    machine = StandInMachine(envoy="Envoy was not found")
    assert worst(machine).text == "Envoy was not found"
    spread = {"ranks": ["10.0.0.1", "10.0.0.2"]}
    assert all(f.level is Level.FINE for f in findings(machine, spread, node=1))


def test_real_ranks_need_linux() -> None:
    assert worst(StandInMachine(platform="darwin")).subject == "system"


def test_without_real_ranks_only_ports_limits_and_envoy_matter() -> None:
    machine = StandInMachine(platform="darwin", executable=None, gpus=None)
    config = Config.model_validate({"groups": [{"engine": "embedded", "name": "e"}]})
    assert [finding.subject for finding in examine(config, None, machine)] == ["ports", "open files", "Envoy"]
