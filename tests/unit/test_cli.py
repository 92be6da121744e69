"""The `wavegate` command as a person types it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from gateway.cli import SUB_COMMANDS, main
from gateway.cli.help_text import folded

EXAMPLE = str(Path(__file__).parents[2] / "wavegate.example.yaml")


def wavegate(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, arguments)


def test_the_overview_names_every_sub_command() -> None:
    shown = wavegate("--help")
    assert shown.exit_code == 0
    assert all(name in shown.output for name in SUB_COMMANDS)


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_sub_command_explains_itself(name: str) -> None:
    shown = wavegate(name, "--help")
    assert shown.exit_code == 0
    assert f"wavegate {name}" in shown.output


def test_the_overview_loads_no_sub_command() -> None:
    """Start-up time is what a person feels, and eight ranks starting at once feel it eight times."""
    program = (
        "import sys\n"
        "from gateway.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'pydantic', 'aiohttp', 'grpc', 'openai', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_an_unknown_sub_command_is_an_error() -> None:
    assert wavegate("serve").exit_code == 2


def test_config_check_counts_what_it_found() -> None:
    checked = wavegate("config", "check", "-c", EXAMPLE)
    assert (checked.exit_code, checked.stdout) == (0, f"{EXAMPLE}: fine: 1 group, 4 ranks\n")


def test_config_check_reports_problems_and_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "wavegate.yaml"
    path.write_text("groups: [{engine: embedded, name: a, prot: 1}]")
    checked = wavegate("config", "check", "-c", str(path))
    assert checked.exit_code == 2
    assert "groups[0].prot: is not a key here; did you mean port?" in checked.stderr
    assert checked.stdout == ""


def test_config_show_prints_a_complete_configuration(tmp_path: Path) -> None:
    shown = wavegate("config", "show", "-c", EXAMPLE)
    assert yaml.safe_load(shown.stdout)["gateway"]["reports"]["timeout_s"] == 1.0
    path = tmp_path / "shown.yaml"
    path.write_text(shown.stdout)
    assert wavegate("config", "show", "-c", str(path)).stdout == shown.stdout


def test_config_schema_is_json_schema_with_descriptions() -> None:
    schema = json.loads(wavegate("config", "schema").stdout)
    assert schema["properties"]["groups"]["description"] == "The groups of ranks behind this gateway."


def test_envoy_config_prints_yaml_for_envoy() -> None:
    printed = wavegate("envoy-config", "-c", EXAMPLE)
    assert set(yaml.safe_load(printed.stdout)) >= {"admin", "static_resources"}


def test_envoy_config_check_asks_envoy() -> None:
    checked = wavegate("envoy-config", "-c", EXAMPLE, "--check")
    assert checked.exit_code == 0
    assert "Envoy accepts the configuration" in checked.stdout


@pytest.mark.parametrize("admin", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_status_without_a_gateway_says_so_in_one_line(admin: str) -> None:
    shown = wavegate("status", "--admin", admin)
    assert shown.exit_code == 1
    assert shown.stderr == (
        "no gateway at http://127.0.0.1:9 (connection refused): is `wavegate up` running, and is this its "
        "admin address (-c FILE, --admin URL)?\n"
    )


def test_status_finds_the_gateway_of_the_configuration_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wavegate.yaml").write_text(
        "groups: [{engine: embedded, name: a}]\ngateway: {admin_port: 9}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "no gateway at http://127.0.0.1:9 " in wavegate("status").stderr


@pytest.mark.parametrize("command", ["gateway", "envoy"])
def test_a_taken_port_is_named_with_its_key_before_anything_starts(command: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "wavegate.yaml"
        path.write_text(f"groups: [{{engine: embedded, name: a}}]\n{command}: {{admin_port: {port}}}\n")
        started = wavegate(command, "-c", str(path))
    assert started.exit_code == 1
    assert f"port {port} for " in started.stderr
    assert f"set {command}.admin_port to another" in started.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("demo", "--engine", "vllm"), "'--engine': 'vllm' is none of embedded, vllm-cpu"),
        (("demo", "--engine", "embeded"), "none of embedded, vllm-cpu; did you mean embedded?"),
        (("ranks", "--as", "yaml"), "'--as': 'yaml' is none of shell, slurm, kubernetes"),
        (("envoy-config", "--part", "rout"), "did you mean route?"),
        (("rank", "--scheduling-policy", "fifo"), "'fifo' is none of fcfs, priority"),
        (("rank", "--model-kind", "mo"), "'mo' is none of moe, dense; did you mean moe?"),
        (
            ("tune", "--slo-ttft-ms=1", "--slo-tpot-ms=1", "--model-preset=moe"),
            "--model-preset: 'moe' is none",
        ),
    ],
)
def test_a_word_that_is_no_choice_is_answered_with_those_there_are(
    arguments: tuple[str, ...], complaint: str
) -> None:
    refused = CliRunner(env={"COLUMNS": "200"}).invoke(main, arguments)
    assert refused.exit_code == 2
    assert complaint in " ".join(refused.stderr.split())
    assert "Value error" not in refused.stderr


def test_help_is_folded_by_the_terminal_and_not_by_the_source() -> None:
    text = "First.\n\n    Second\n    goes on.\n\n    \b\n    A table\n      of two lines."
    assert folded(text) == "First.\n\nSecond goes on.\n\nA table\n  of two lines."


@pytest.mark.parametrize(("name", "default"), [("demo", "4, with vllm-cpu 2"), ("tune", "as it is, or 8")])
def test_help_shows_defaults_that_are_found_out(name: str, default: str) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(main, [name, "--help"])
    assert f"[default: ({default}" in shown.output
