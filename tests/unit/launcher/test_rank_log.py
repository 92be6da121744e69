"""Phases and failures read from the output of real ranks (vLLM 0.32)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ranks.launcher.rank_log import MAX_ERROR_LINES, Phase, RankLog, describe_together

WORKER = "(Worker_DP1 pid=28117) INFO 11-30 13:02:01 [v1/worker/cpu_model_runner.py:68] "
ERROR = "(Worker_DP0 pid=28116) ERROR 11-30 13:03:12 [v1/executor/multiproc_executor.py:1063] "

LOADING = [
    ("(APIServer pid=1) INFO 11-30 13:01:37 [config/model.py:733] Resolved architecture: X", Phase.STARTING),
    (WORKER + "Starting to load model /models/tiny...", Phase.LOADING),
    ("model-00001-of-00016.safetensors:  12%|█▏        | 480M/4.00G", Phase.DOWNLOADING),
    ("Loading safetensors checkpoint shards:  50% Completed | 8/16 [00:10<00:10]", Phase.LOADING),
    (WORKER + "Loading weights took 20.52 seconds", Phase.LOADING),
    (WORKER + "Dynamo bytecode transform time: 5.12 s", Phase.COMPILING),
    ("Capturing CUDA graphs (decode, FULL):  30%|███       | 10/35", Phase.CAPTURING),
    (WORKER + "Graph capturing finished in 5 secs, took 0.5 GiB", Phase.CAPTURING),
    (
        "(EngineCore_DP1 pid=2) INFO 11-30 13:02:02 [v1/engine/core.py:402] "
        "init engine (profile, create kv cache, warmup model) took 0.26 s",
        Phase.JOINING,
    ),
    ("INFO:     Application startup complete.", Phase.READY),
    (
        "(APIServer pid=1) INFO 11-30 14:00:00 [entrypoints/launchers/launcher.py:249] "
        "[shutdown] API server: shutdown triggered",
        Phase.STOPPING,
    ),
]


def read(*lines: str, at_s: float = 0.0, log: RankLog | None = None) -> RankLog:
    """A log that has these lines."""
    log = log or RankLog(0.0)
    log.feed("".join(f"{line}\n" for line in lines).encode(), at_s)
    return log


def test_phases_follow_the_messages_of_a_rank_that_loads() -> None:
    log = RankLog(0.0)
    for second, (line, phase) in enumerate(LOADING):
        assert read(line, at_s=second, log=log).phase is phase


def test_a_phase_begins_with_its_first_message() -> None:
    log = read(WORKER + "Starting to load model /models/tiny...", at_s=3.0)
    read("Loading safetensors checkpoint shards:  50% Completed | 8/16", at_s=9.0, log=log)
    assert (log.phase_since_s, log.heard_at_s, log.percent) == (3.0, 9.0, 50)
    assert log.describe() == "loading weights 50 %"


def test_a_new_phase_starts_without_percentage() -> None:
    log = read("Loading safetensors checkpoint shards: 100% Completed | 16/16", LOADING[5][0])
    assert log.describe() == "compiling"


def test_progress_bars_that_overwrite_their_line_are_read() -> None:
    log = RankLog(0.0)
    for piece in (b"\rLoading safetensors check", b"point shards:  25% Completed | 1/4\rLoading"):
        log.feed(piece, 1.0)
    assert log.describe() == "loading weights 25 %"


@given(st.data())
def test_output_may_be_cut_anywhere(data: st.DataObject) -> None:
    output = "".join(f"{line}\n" for line, _ in LOADING).encode()
    log = RankLog(0.0)
    while output:
        cut = data.draw(st.integers(1, len(output)))
        log.feed(output[:cut], 0.0)
        output = output[cut:]
    assert log.phase is Phase.STOPPING


@given(st.binary())
def test_any_output_is_survived(output: bytes) -> None:
    RankLog(0.0).feed(output, 0.0)


def test_exceptions_are_kept_without_their_tracebacks() -> None:
    log = read(
        ERROR + "WorkerProc hit an exception.",
        ERROR + "Traceback (most recent call last):",
        ERROR + '  File "vllm/v1/worker/worker_base.py", line 370, in execute_model',
        ERROR + "    raise RuntimeError(",
        ERROR + "RuntimeError: Read error [127.0.0.1]:37529: Connection reset by peer.",
        ERROR + "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        at_s=5.0,
    )
    assert log.trouble is not None
    assert log.trouble.began_at_s == 5.0
    assert log.trouble.lines == [
        "RuntimeError: Read error [127.0.0.1]:37529: Connection reset by peer.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve: error: argument --port: invalid int value: 'x'",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "KeyboardInterrupt",
        "/no/such/vllm: No such file or directory",
    ],
)
def test_what_a_process_says_when_it_cannot_go_on_is_trouble(line: str) -> None:
    trouble = read(line).trouble
    assert trouble is not None
    assert trouble.lines == [line]


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=1) WARNING 11-30 13:01:27 [utils/system_utils.py:255] OSError: Too many open files",
        "(APIServer pid=1) DEBUG 11-30 13:01:27 [x.py:24] EngineDeadError: EngineCore encountered an issue.",
        'INFO:     127.0.0.1:37 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
        "nanobind: leaked 514 functions!",
    ],
)
def test_what_only_sounds_like_it_is_not(line: str) -> None:
    assert read(line).trouble is None


def test_an_error_that_was_survived_does_not_explain_a_later_failure() -> None:
    log = read("ValueError: too long", at_s=0.0)
    read("RuntimeError: dead", at_s=100.0, log=log)
    assert log.trouble is not None
    assert (log.trouble.began_at_s, log.trouble.lines) == (100.0, ["RuntimeError: dead"])


def test_a_flood_of_errors_keeps_the_first_ones() -> None:
    log = read(*(f"RuntimeError: {number}" for number in range(1000)))
    assert log.trouble is not None
    assert log.trouble.lines == [f"RuntimeError: {number}" for number in range(MAX_ERROR_LINES)]


def test_a_group_is_described_in_one_line() -> None:
    logs = {f"g/{rank}": read(WORKER + "Starting to load model x...") for rank in range(3)}
    read("Loading safetensors checkpoint shards:  50% Completed | 8/16", log=logs["g/1"])
    read("Loading safetensors checkpoint shards:  10% Completed | 1/16", log=logs["g/2"])
    logs["g/3"] = read("Capturing CUDA graphs:  30%|███       | 10/35")
    assert describe_together(logs) == "3 loading weights, g/3 capturing graphs 30 %"
    read("Loading safetensors checkpoint shards:  20% Completed | 1/16", log=logs["g/0"])
    assert describe_together(logs) == "3 loading weights 10 %, g/3 capturing graphs 30 %"
