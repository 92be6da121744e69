from __future__ import annotations

import msgspec
import pytest

from tests.builders_rank_config import external, parallel_config, rank_config
from vllm_ranks.engine.config import RankConfig
from vllm_ranks.engine.derivation import ConfigError, offset_endpoint_port


def refusal(**arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        rank_config(**arguments)
    return str(caught.value)


# --- Modes ----------------------------------------------------------------------------------------------


def test_giving_a_rank_means_external_mode_with_one_engine_and_one_api_server() -> None:
    config = rank_config(data_parallel_size=4, data_parallel_rank=2)
    assert config.parallel.data_parallel_external_lb
    assert config.parallel.data_parallel_size_local == 1
    assert config.parallel.managed_ranks == config.parallel.local_ranks == (2,)
    assert config.server.api_server_count == 1


def test_rank_0_means_external_mode_too() -> None:
    assert external(rank=0).data_parallel_external_lb


def test_a_size_alone_means_internal_mode_with_an_api_server_per_engine() -> None:
    config = rank_config(data_parallel_size=4)
    assert not config.parallel.local_engines_only
    assert config.parallel.local_ranks == config.parallel.managed_ranks == (0, 1, 2, 3)
    assert config.server.api_server_count == 4


def test_a_start_rank_with_a_local_size_means_hybrid_mode() -> None:
    config = rank_config(data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)
    assert config.parallel.data_parallel_hybrid_lb
    assert config.parallel.managed_ranks == (2, 3)
    assert config.server.api_server_count == 2


def test_hybrid_mode_with_one_local_engine_becomes_external_mode() -> None:
    parallel = parallel_config(data_parallel_size=4, data_parallel_size_local=1, data_parallel_start_rank=3)
    assert (parallel.data_parallel_external_lb, parallel.data_parallel_hybrid_lb) == (True, False)
    assert parallel.data_parallel_rank == 3


def test_hybrid_mode_on_a_single_node_becomes_internal_mode() -> None:
    parallel = parallel_config(data_parallel_size=4, data_parallel_size_local=4, data_parallel_hybrid_lb=True)
    assert not parallel.local_engines_only


def test_a_headless_node_has_no_api_server_and_keeps_the_internal_mode() -> None:
    config = rank_config(
        data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2, headless=True
    )
    assert config.server.api_server_count == 0
    assert not config.parallel.local_engines_only
    assert config.parallel.local_ranks == (2, 3)


def test_the_default_port_is_8100_plus_the_rank() -> None:
    ports = [rank_config(data_parallel_size=4, data_parallel_rank=rank).server.port for rank in range(4)]
    assert ports == [8100, 8101, 8102, 8103]


def test_defaults_are_those_of_vllm() -> None:
    config = rank_config()
    assert config.parallel.data_parallel_rpc_port == 29550
    assert config.parallel.data_parallel_master_ip == "127.0.0.1"
    assert config.parallel.dp_sync_interval == 16
    assert config.scheduler.prefill_schedule_interval == 1
    assert config.scheduler.max_num_seqs == 256
    assert config.scheduler.max_num_queued_reqs is None
    assert config.server.shutdown_timeout_s == 0
    assert config.server.handshake_timeout_s == 300
    assert config.server.engine_ready_timeout_s == 600


def test_a_configuration_survives_its_way_into_another_process() -> None:
    config = rank_config(
        data_parallel_size=2,
        data_parallel_rank=1,
        step_fixed_ms=5.0,
        enable_lora=True,
        lora_modules=("a=/a",),
        kv_events_config='{"enable_kv_cache_events": true}',
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=RankConfig) == config


# --- Coordinator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "needed", "stats"),
    [
        ({"data_parallel_size": 1}, False, False),
        ({"data_parallel_size": 2}, True, True),
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, True, False),
        ({"data_parallel_size": 2, "model_kind": "dense"}, True, True),
    ],
    ids=["one rank", "internal MoE", "external MoE", "internal dense"],
)
def test_who_needs_a_coordinator_and_who_tells_it_queue_lengths(
    arguments: dict[str, object], needed: bool, stats: bool
) -> None:
    parallel = parallel_config(**arguments)
    assert (parallel.needs_coordinator, parallel.publishes_queue_stats) == (needed, stats)


def test_only_a_moe_group_steps_in_lock_step() -> None:
    assert external().lock_step
    assert not parallel_config(data_parallel_size=2, model_kind="dense").lock_step
    assert not parallel_config(model_kind="moe").lock_step


# --- Refusals, with vLLM's texts ------------------------------------------------------------------------


def test_more_than_one_mode_is_refused() -> None:
    text = refusal(data_parallel_size=4, data_parallel_rank=0, data_parallel_start_rank=0)
    assert text.startswith("Cannot use more than one data parallel load balancing mode. Choose one of: ")


def test_hybrid_and_external_flags_together_are_refused_as_two_modes() -> None:
    text = refusal(data_parallel_size=4, data_parallel_external_lb=True, data_parallel_hybrid_lb=True)
    assert "Cannot use more than one data parallel load balancing mode" in text


def test_hybrid_and_external_flags_are_refused_on_a_headless_node_too() -> None:
    text = refusal(
        data_parallel_size=4, data_parallel_external_lb=True, data_parallel_hybrid_lb=True, headless=True
    )
    assert text == (
        "Invalid data-parallel launch options: `--data-parallel-hybrid-lb` and "
        "`--data-parallel-external-lb` cannot be enabled together. Enable only one load-balancing mode."
    )


def test_external_mode_without_a_rank_is_refused() -> None:
    assert refusal(data_parallel_size=4, data_parallel_external_lb=True).startswith(
        "Invalid data-parallel launch options: `--data-parallel-external-lb` requires a data-parallel rank."
    )


def test_an_external_rank_with_several_local_engines_is_refused() -> None:
    text = refusal(data_parallel_size=4, data_parallel_rank=0, data_parallel_size_local=2)
    assert text == (
        "Invalid data-parallel launch options: an external data-parallel rank requires "
        "`--data-parallel-size-local 1`; got 2. Set it to 1 or omit it."
    )


def test_a_dense_model_in_external_mode_is_refused_with_vllms_advice() -> None:
    text = refusal(data_parallel_size=2, data_parallel_rank=0, model_kind="dense")
    assert text == (
        "Non-MoE models do not support external data parallel mode. For external load balancing, "
        "launch independent vLLM instances without --data-parallel-* arguments."
    )


def test_hybrid_mode_without_a_local_size_is_refused() -> None:
    text = refusal(data_parallel_size=4, data_parallel_hybrid_lb=True)
    assert "`--data-parallel-hybrid-lb` requires `--data-parallel-size-local`" in text


def test_a_rank_in_a_group_of_one_is_refused() -> None:
    text = refusal(data_parallel_rank=0)
    assert text == "data_parallel_external_lb can only be set when data_parallel_size > 1"


def test_more_local_engines_than_ranks_are_refused() -> None:
    text = refusal(data_parallel_size=2, data_parallel_size_local=3)
    assert text == "data_parallel_size_local (3) must be <= data_parallel_size (2)"


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    text = refusal(data_parallel_size=4, data_parallel_rank=rank)
    assert text == f"data_parallel_rank ({rank}) must be in the range [0, 4)"


def test_local_engines_beyond_the_group_are_refused() -> None:
    text = refusal(data_parallel_size=4, data_parallel_size_local=3, data_parallel_start_rank=2)
    assert text == (
        "data_parallel_start_rank (2) + data_parallel_size_local (3) must be <= data_parallel_size (4)"
    )


def test_api_servers_on_a_headless_node_are_refused() -> None:
    assert refusal(headless=True, api_server_count=1).startswith("--api-server-count=1 cannot be used with")


def test_a_headless_node_in_hybrid_mode_is_refused() -> None:
    text = refusal(
        data_parallel_size=4, data_parallel_size_local=2, data_parallel_hybrid_lb=True, headless=True
    )
    assert text == "data_parallel_hybrid_lb is not applicable in headless mode"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"max_num_batched_tokens": 128, "max_num_seqs": 256},
            "max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256).",
        ),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens (2048) is smaller than max_model_len"),
        ({"num_gpu_blocks": 100}, "The model's max seq len (131072) is larger than the maximum number"),
        ({"time_scale": 0}, "time_scale (0) must be above 0"),
        ({"time_model_preset": "warp"}, "unknown time model preset 'warp': choose one of "),
        ({"slowdown": -1}, "time model: slowdown must be above 0"),
        ({"lora_modules": ("a=b",)}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "--lora-modules 'a': write name=path"),
        ({"kv_events_config": "{"}, "--kv-events-config is not the JSON object it should be: "),
        (
            {"kv_events_config": '{"enable_kv_cache_events": true, "publisher": "kafka"}'},
            "Unknown event publisher 'kafka'",
        ),
        ({"port": 70000}, "port (70000) must be in the range [1, 65535]"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(arguments: dict[str, object], text: str) -> None:
    assert refusal(**arguments).startswith(text)


def test_kv_events_over_ipc_are_refused_for_ranks_above_0() -> None:
    events = '{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/events"}'
    assert rank_config(kv_events_config=events)
    assert refusal(data_parallel_size=2, data_parallel_rank=1, kv_events_config=events) == (
        "Invalid endpoint: must contain 'inproc' or 'tcp'"
    )


# --- The rest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        (None, 2, None),
    ],
)
def test_each_rank_has_its_own_event_endpoint(endpoint: str | None, rank: int, expected: str | None) -> None:
    assert offset_endpoint_port(endpoint, rank) == expected


def test_the_config_hash_ignores_who_and_where_a_rank_is() -> None:
    one = external(rank=0, data_parallel_rpc_port=1234, data_parallel_address="10.0.0.1")
    assert one.compute_hash() == external(rank=1).compute_hash()


@pytest.mark.parametrize("difference", [{"dp_sync_interval": 8}, {"time_scale": 2.0}, {"size": 3}])
def test_the_config_hash_tells_what_ranks_must_agree_on(difference: dict[str, object]) -> None:
    assert external(**difference).compute_hash() != external().compute_hash()  # type: ignore[arg-type]


def test_step_costs_replace_those_of_the_preset() -> None:
    model = rank_config(step_fixed_ms=5.0, prefill_us_per_token=10.0, kv_ns_per_token=1.0).time_model
    assert (model.fixed_s, model.per_prefill_token_s, model.per_kv_token_s) == pytest.approx(
        (0.005, 1e-5, 1e-9)
    )
    assert model.per_decode_sequence_s == rank_config().time_model.per_decode_sequence_s


def test_a_dummy_batch_costs_the_fixed_cost_unless_said_otherwise() -> None:
    assert rank_config(step_fixed_ms=5.0).time_model.dummy_s == pytest.approx(0.005)
    assert rank_config(step_fixed_ms=5.0, dummy_step_ms=7.0).time_model.dummy_s == pytest.approx(0.007)
