"""What vLLM tells of LoRA adapters after each of some steps, in which requests wait, run and finish."""

import json
import sys
from types import SimpleNamespace

from prometheus_client import REGISTRY, generate_latest
from vllm.config import CacheConfig, ObservabilityConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, SchedulerStats


def main() -> None:
    question = json.loads(sys.stdin.readline())
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m", max_model_len=1024, is_diffusion=False),
        observability_config=ObservabilityConfig(),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        watermark_config=None,
        lora_config=SimpleNamespace(max_loras=question["max_loras"]),
        cache_config=CacheConfig(block_size=16),
    )
    logger = PrometheusStatLogger(config, [0])
    states = LoRARequestStates(log_stats=True)
    pages = []
    for step in question["steps"]:
        for change, request_id, adapter in step:
            getattr(states, f"request_{change}")(request_id, adapter)
        stats = SchedulerStats()
        states.update_scheduler_stats(stats)
        logger.record(stats, IterationStats(), engine_idx=0)
        pages.append(generate_latest(REGISTRY).decode())
    print("ANSWER " + json.dumps(pages), flush=True)


if __name__ == "__main__":
    main()
