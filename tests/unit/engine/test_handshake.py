"""The front end's half of the handshake, message by message."""

from __future__ import annotations

import pytest

from tests.builders_rank_config import external, parallel_config
from vllm_ranks.engine import wire
from vllm_ranks.engine.config import ParallelConfig
from vllm_ranks.engine.handshake import EngineRegistry, HandshakeError, expected_engines

INIT = wire.HandshakeInit(wire.EngineAddresses(["ipc://in"], ["ipc://out"]), {"data_parallel_size": 2})


def registry(parallel: ParallelConfig) -> EngineRegistry:
    return EngineRegistry(parallel, expected_engines(parallel), INIT)


def message(status: str, *, local: bool, headless: bool = False, config_hash: str | None = None) -> bytes:
    return wire.encode(wire.HandshakeStatus(status, local, headless, config_hash))


def hello(*, local: bool, headless: bool = False) -> bytes:
    return message("HELLO", local=local, headless=headless)


def error_of(engines: EngineRegistry, rank: int, payload: bytes) -> str:
    with pytest.raises(HandshakeError) as caught:
        engines.on_message(wire.engine_identity(rank), payload)
    return str(caught.value)


def test_rank_0_waits_for_every_engine_and_other_ranks_for_their_own() -> None:
    assert expected_engines(external(rank=0, size=3)) == {0: True, 1: False, 2: False}
    assert expected_engines(external(rank=2, size=3)) == {2: True}


def test_the_head_of_an_internal_group_waits_for_remote_engines_too() -> None:
    parallel = parallel_config(data_parallel_size=4, data_parallel_size_local=2)
    assert expected_engines(parallel) == {0: True, 1: True, 2: False, 3: False}


def test_engines_are_walked_from_hello_over_init_to_ready() -> None:
    parallel = external(rank=0)
    engines = registry(parallel)
    for rank, local in ((1, False), (0, True)):
        assert engines.on_message(wire.engine_identity(rank), hello(local=local)) is INIT
    assert not engines.complete
    for rank, local in ((0, True), (1, False)):
        ready = message("READY", local=local, config_hash=parallel.compute_hash())
        assert engines.on_message(wire.engine_identity(rank), ready) is None
    assert engines.complete


def test_an_unexpected_rank_is_refused() -> None:
    assert error_of(registry(external(rank=0)), 2, hello(local=False)) == (
        "Message from engine with unexpected data parallel rank: 2"
    )


def test_a_local_engine_that_should_be_remote_is_refused() -> None:
    assert error_of(registry(external(rank=0)), 1, hello(local=True)) == (
        "HELLO message from local engine 1, expected it to be remote"
    )


def test_a_remote_engine_that_should_be_local_is_refused() -> None:
    assert error_of(registry(external(rank=0)), 0, hello(local=False)) == (
        "HELLO message from remote engine 0, expected it to be local"
    )


def test_a_headless_engine_is_refused_in_external_mode() -> None:
    assert error_of(registry(external(rank=0)), 1, hello(local=False, headless=True)) == (
        "Remote engine 1 must not use --headless in external or hybrid dp lb mode"
    )


def test_an_engine_that_is_not_headless_is_refused_in_internal_mode() -> None:
    engines = registry(parallel_config(data_parallel_size=2, data_parallel_size_local=1))
    assert error_of(engines, 1, hello(local=False)) == (
        "Remote engine 1 must use --headless unless in external or hybrid dp lb mode"
    )


def test_a_second_engine_of_the_same_rank_is_refused() -> None:
    engines = registry(external(rank=0))
    engines.on_message(wire.engine_identity(1), hello(local=False))
    assert error_of(engines, 1, hello(local=False)) == (
        "Unexpected HELLO message for remote engine 1 in CONNECTED state."
    )


def test_ready_before_hello_is_refused() -> None:
    assert error_of(registry(external(rank=0)), 1, message("READY", local=False)) == (
        "Unexpected READY message for remote engine 1 in NEW state."
    )


def test_an_engine_with_another_configuration_is_refused() -> None:
    parallel = external(rank=0)
    engines = registry(parallel)
    engines.on_message(wire.engine_identity(1), hello(local=False))
    other = external(rank=1, dp_sync_interval=8).compute_hash()
    text = error_of(engines, 1, message("READY", local=False, config_hash=other))
    assert text.startswith("Configuration mismatch detected for engine 1.")
    assert f"Worker hash: {other}, Expected hash: {parallel.compute_hash()}." in text


def test_dense_engines_need_not_agree_on_their_configuration() -> None:
    engines = registry(parallel_config(data_parallel_size=2, model_kind="dense"))
    for rank in (0, 1):
        engines.on_message(wire.engine_identity(rank), hello(local=True))
        engines.on_message(wire.engine_identity(rank), message("READY", local=True, config_hash="any"))
    assert engines.complete


def test_a_message_that_is_no_handshake_is_refused() -> None:
    assert error_of(registry(external(rank=0)), 1, b"\xc1").startswith(
        "Unreadable handshake message from engine 1"
    )
