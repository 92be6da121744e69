"""The vLLM side of tests: programs run by the python of a separate environment that has vLLM.

Its path is in WAVEGATE_VLLM_PYTHON, by default `.venv-vllm/bin/python`; without it the tests that need it
are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "vllm" / "programs"
VLLM_PYTHON = Path(os.environ.get("WAVEGATE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
ANSWER = "ANSWER "
"""What a program prints before its JSON answer: vLLM itself prints whatever it likes."""
QUIET_CPU = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}


def real_rank_environment() -> dict[str, str]:
    """For `vllm serve` on few CPU cores: one thread, little KV cache, no look at the network."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def vllm_python() -> str:
    """The interpreter; skips the test if there is none."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"no vLLM environment at {VLLM_PYTHON}: make vllm-env, or set WAVEGATE_VLLM_PYTHON")
    return str(VLLM_PYTHON)


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, ended in any case."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **QUIET_CPU},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def tell(process: subprocess.Popen[str], question: Any) -> None:
    """Give a program one line of JSON."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()


def answer_of(process: subprocess.Popen[str]) -> Any:
    """The next answer a program prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise AssertionError(f"the program ended without an answer, exit code {process.wait()}")


def ask_vllm(program: str, question: Any) -> Any:
    """What tests/vllm/programs/<program>.py answers to a question."""
    with running([vllm_python(), str(PROGRAMS / f"{program}.py")]) as process:
        tell(process, question)
        return answer_of(process)
