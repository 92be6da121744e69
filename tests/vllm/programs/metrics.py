"""Exposes what vLLM's own metric logger registers for one engine, with something recorded."""

import json
import sys
from types import SimpleNamespace

from prometheus_client import REGISTRY, generate_latest
from vllm.config import CacheConfig, ObservabilityConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats


def main() -> None:
    question = json.loads(sys.stdin.readline())
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            served_model_name=question["model_name"],
            max_model_len=question["max_model_len"],
            is_diffusion=False,
        ),
        observability_config=ObservabilityConfig(),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        watermark_config=None,
        lora_config=SimpleNamespace(max_loras=question["max_loras"]),
        cache_config=CacheConfig(block_size=question["block_size"]),
    )
    logger = PrometheusStatLogger(config, [question["engine"]])
    logger.log_engine_initialized()
    logger.record(SchedulerStats(), IterationStats(), engine_idx=question["engine"])
    print("ANSWER " + json.dumps(generate_latest(REGISTRY).decode()), flush=True)


if __name__ == "__main__":
    main()
