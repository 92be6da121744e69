"""The commands that start real vLLM ranks, word by word."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config_groups import VllmGroup
from vllm_ranks.launcher.command import RankCommand, as_shell, rank_commands


def group(**fields: Any) -> VllmGroup:
    """A group of a MoE model as a configuration describes it."""
    return VllmGroup.model_validate(
        {"engine": "vllm", "name": "g", "model": "org/moe", "moe": True, **fields}
    )


def commands(**fields: Any) -> tuple[RankCommand, ...]:
    """How its ranks are started."""
    return rank_commands(group(**fields).launch())


def lines(**fields: Any) -> list[str]:
    """The same, as lines for a shell."""
    return as_shell(commands(**fields)).splitlines()


def reasons(**fields: Any) -> str:
    """Why a group is refused."""
    with pytest.raises(ValidationError) as refused:
        group(**fields)
    return str(refused.value)


def test_a_lock_step_group_on_one_machine_runs_in_external_load_balancer_mode() -> None:
    assert lines(data_parallel_size=2, port=8100, data_parallel_rpc_port=29550) == [
        f"CUDA_VISIBLE_DEVICES={rank} vllm serve org/moe --host 127.0.0.1 --port 810{rank} "
        f"--data-parallel-size 2 --data-parallel-rank {rank} --data-parallel-external-lb "
        "--data-parallel-address 127.0.0.1 --data-parallel-rpc-port 29550"
        for rank in (0, 1)
    ]


def test_every_machine_runs_its_share_on_the_same_ports_and_devices() -> None:
    ranks = commands(data_parallel_size=4, ranks=["10.0.0.1", "10.0.0.2"], tensor_parallel_size=2, port=8000)
    places = [(c.place.node, c.place.index, c.place.host, c.place.port, c.place.devices) for c in ranks]
    assert places == [
        (0, 0, "10.0.0.1", 8000, ("0", "1")),
        (0, 1, "10.0.0.1", 8001, ("2", "3")),
        (1, 2, "10.0.0.2", 8000, ("0", "1")),
        (1, 3, "10.0.0.2", 8001, ("2", "3")),
    ]
    assert {_option(c, "--data-parallel-address") for c in ranks} == {"10.0.0.1"}
    assert {_option(c, "--tensor-parallel-size") for c in ranks} == {"2"}


def test_a_group_of_one_is_an_ordinary_server() -> None:
    assert lines(port=8000) == ["CUDA_VISIBLE_DEVICES=0 vllm serve org/moe --host 127.0.0.1 --port 8000"]


def test_a_name_for_clients_is_told_only_if_it_differs() -> None:
    (rank,) = commands(model="chat", model_path="/models/moe")
    assert rank.command[:5] == ("vllm", "serve", "/models/moe", "--served-model-name", "chat")
    assert "--served-model-name" not in commands(model="/models/moe")[0].command


def test_own_options_and_variables_come_last_and_win() -> None:
    (line,) = lines(
        args=["--max-num-seqs", 64, "--chat-template", "a b"],
        env={"HF_HOME": "/data", "CUDA_VISIBLE_DEVICES": "7"},
        max_num_batched_tokens=768,
    )
    assert line == (
        "CUDA_VISIBLE_DEVICES=7 HF_HOME=/data vllm serve org/moe --host 127.0.0.1 --port 8100 "
        "--max-num-batched-tokens 768 --max-num-seqs 64 --chat-template 'a b'"
    )


def test_devices_are_shared_out_in_the_order_given() -> None:
    ranks = commands(data_parallel_size=2, tensor_parallel_size=2, devices=[4, 5, "GPU-1", "GPU-2"])
    assert [rank.environment for rank in ranks] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"},
    ]


def test_another_variable_may_name_the_devices() -> None:
    (rank,) = commands(device_variable="HIP_VISIBLE_DEVICES")
    assert rank.environment == {"HIP_VISIBLE_DEVICES": "0"}


def test_no_devices_are_named_on_a_cpu() -> None:
    assert [rank.environment for rank in commands(data_parallel_size=2, devices=[])] == [{}, {}]


@pytest.mark.parametrize(
    ("host", "publisher", "replayer"),
    [
        ("10.0.0.1", "tcp://[::ffff:10.0.0.1]:5557", "tcp://10.0.0.1:5559"),
        ("fd00::1", "tcp://*:5557", "tcp://*:5559"),
    ],
)
def test_kv_events_are_published_on_the_ranks_own_address(host: str, publisher: str, replayer: str) -> None:
    for rank in commands(data_parallel_size=2, host=host, kv_events_port=5557):
        assert _option(rank, "--kv-events-config") == (
            '{"enable_kv_cache_events":true,"publisher":"zmq",'
            f'"endpoint":"{publisher}","replay_endpoint":"{replayer}"}}'
        )


def test_a_dense_model_becomes_replicas_with_the_same_places() -> None:
    replicas = group(
        data_parallel_size=4, ranks=["10.0.0.1", "10.0.0.2"], tensor_parallel_size=2, port=8000
    ).replicas()
    assert [replica.name for replica in replicas] == ["g-0", "g-1", "g-2", "g-3"]
    assert [as_shell(rank_commands(replica.launch())) for replica in replicas] == [
        f"CUDA_VISIBLE_DEVICES={devices} vllm serve org/moe --host {host} --port {port} "
        "--tensor-parallel-size 2"
        for host in ("10.0.0.1", "10.0.0.2")
        for devices, port in (("0,1", 8000), ("2,3", 8001))
    ]


def test_replicas_publish_kv_events_on_ports_of_their_own() -> None:
    replicas = group(data_parallel_size=3, kv_events_port=6000).replicas()
    events = [replica.launch().kv_events for replica in replicas]
    ports = [port for event in events if event for port in (event.port, event.replay_port)]
    assert ports == [6000, 6001, 6002, 6003, 6004, 6005]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data_parallel_size": 3, "ranks": ["10.0.0.1", "10.0.0.2"]}, "2 machines cannot share"),
        ({"ranks": ["10.0.0.1", "10.0.0.1"], "data_parallel_size": 2}, "ranks names a machine twice"),
        ({"port": 65535, "data_parallel_size": 2}, "port + ranks of a machine - 1 is 65536"),
        ({"kv_events_port": 65535}, "lower kv_events_port"),
        ({"devices": [0], "tensor_parallel_size": 2}, "devices names 1, but a machine runs 1 ranks"),
        ({"args": ["--port", "1"]}, "gives the ranks --port; write port: … instead"),
        ({"args": ["--data_parallel_rank=1"]}, "gives the ranks --data_parallel_rank=1; leave it out"),
        ({"args": ["-tp", "2"]}, "gives the ranks -tp; leave it out"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], reason: str) -> None:
    assert reason in reasons(**fields)


def _option(rank: RankCommand, name: str) -> str:
    return rank.command[rank.command.index(name) + 1]
