"""The README's section on one's own vLLM, followed word by word; only the ports are others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders_ports import consecutive_free_ports, free_port
from tests.builders_vllm import ROOT, vllm_python
from tests.builders_wavegate import running_wavegate

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BIN = Path(sys.executable).parent
START_LIMIT_S = 240.0


def section() -> str:
    """What the README says."""
    text = (ROOT / "README.md").read_text()
    return text.partition("## With your own vLLM\n")[2].partition("\n## ")[0]


def script(folder: Path) -> tuple[list[str], Any]:
    """The commands without those that install and start, and the configuration that they write."""
    (block,) = re.findall(r"```sh\nmake vllm-env.*?```", section(), re.DOTALL)
    content = block.partition("<<'END'\n")[2].partition("\nEND\n")[0]
    commands = [line.split("#")[0].strip() for line in block.splitlines() if line.startswith(".venv/")]
    return commands, yaml.safe_load(content)


async def test_the_section_on_ones_own_vllm_works_as_written(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(BIN.parent)
    (tmp_path / ".venv-vllm").symlink_to(Path(vllm_python()).parents[1])
    commands, config = script(tmp_path)
    make_model, doctor, up = commands
    assert up == ".venv/bin/wavegate up -c tiny.yaml"

    def run(command: str) -> str:
        finished = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    run(make_model.replace(".venv/bin/python", f"PYTHONPATH={ROOT} .venv/bin/python"))
    config["groups"][0] |= {"port": consecutive_free_ports(2), "data_parallel_rpc_port": free_port()}
    config["envoy"] = {"port": free_port(), "admin_port": free_port(), "worker_threads": 1}
    config["gateway"] = {"admin_port": free_port(), "ext_proc_listen": f"127.0.0.1:{free_port()}"}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    wavegate = f"PYTHONPATH={ROOT} .venv/bin/python -m gateway.cli"
    assert "nothing stands in the way" in run(doctor.replace(".venv/bin/wavegate", wavegate))
    async with running_wavegate(tmp_path, *up.split()[1:]) as running:
        await running.says("serving on http://127.0.0.1:", within_s=START_LIMIT_S)
        (block,) = re.findall(r"```sh\n(curl.*?)```", section(), re.DOTALL)
        ask, status = block.strip().rpartition("\n")[::2]
        answer = run(ask.replace("localhost:8080", f"localhost:{config['envoy']['port']}"))
        assert "HTTP/1.1 200 OK" in answer
        assert re.search(r"x-wavegate-rank: tiny/[01]", answer)
        assert status == ".venv/bin/wavegate status"
        table = run(status.replace(".venv/bin/wavegate", wavegate) + " -c tiny.yaml")
        assert "tiny/0" in table
        assert "tiny/1" in table
        running.process.terminate()
        assert await running.exit_status() == 0
