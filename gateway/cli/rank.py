"""`wavegate rank`: one embedded rank, with the option names of `vllm serve`.

Must only read options: what they mean is `vllm_ranks.engine.derivation`'s business.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
import typer

from gateway.cli.choices import one_of, shown
from vllm_ranks.engine.arguments import (
    LoadBalancingScore,
    ModelKind,
    PeerDeathPolicy,
    RankArguments,
    SchedulingPolicy,
)
from vllm_ranks.engine.time_model import DEFAULT_PRESET, PRESETS

MODEL = "Model and server"
PARALLEL = "Data parallelism (as in vLLM)"
SCHEDULER = "Scheduler and KV cache (as in vLLM)"
TIME = "Time model (embedded engine only)"
EVALUATION = "Evaluation (embedded engine only)"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def rank(
    model: Annotated[
        str, typer.Option(help="Name of the model to stand for; nothing is loaded.", rich_help_panel=MODEL)
    ] = "wavegate-embedded",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name clients ask for, instead of --model; repeat for more.", rich_help_panel=MODEL
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.", rich_help_panel=MODEL),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="HTTP port. Default: 8100 + rank.", rich_help_panel=MODEL)
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt and output together, in tokens.", rich_help_panel=MODEL)
    ] = 131_072,
    api_server_count: Annotated[
        int | None,
        typer.Option(
            "--api-server-count",
            "-asc",
            help="API server processes sharing the port. Default: 1 in external mode, else one per engine.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    headless: Annotated[
        bool,
        typer.Option("--headless", help="Engines only, for a front end elsewhere.", rich_help_panel=MODEL),
    ] = False,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="On SIGTERM: 0 cuts everything; above, seconds to finish what is under way while new "
            'requests are answered 200 with finish_reason "abort".',
            rich_help_panel=MODEL,
        ),
    ] = 0.0,
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="Leave /metrics at zero.", rich_help_panel=MODEL)
    ] = False,
    enable_server_load_tracking: Annotated[
        bool,
        typer.Option(
            "--enable-server-load-tracking",
            help="/load counts requests under way; without this it says 0.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    enable_prompt_tokens_details: Annotated[
        bool,
        typer.Option(
            "--enable-prompt-tokens-details", help="usage tells cached_tokens.", rich_help_panel=MODEL
        ),
    ] = False,
    enable_request_id_headers: Annotated[
        bool,
        typer.Option(
            "--enable-request-id-headers", help="Answers carry X-Request-Id.", rich_help_panel=MODEL
        ),
    ] = False,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Serve LoRA adapters by name.", rich_help_panel=MODEL)
    ] = False,
    max_loras: Annotated[
        int, typer.Option(help="Adapters in one batch, as told by metrics.", rich_help_panel=MODEL)
    ] = 1,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(help="An adapter as name=path; repeat for more.", rich_help_panel=MODEL),
    ] = None,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            "--data-parallel-size",
            "-dp",
            help="Ranks of the group. Without a rank: internal mode, one server balancing over all engines.",
            rich_help_panel=PARALLEL,
        ),
    ] = 1,
    data_parallel_rank: Annotated[
        int | None,
        typer.Option(
            "--data-parallel-rank",
            "-dpn",
            help="This process's rank: external mode, one server per rank, balanced from outside. "
            "Rank 0 starts the coordinator; no rank answers before all are there.",
            rich_help_panel=PARALLEL,
        ),
    ] = None,
    data_parallel_start_rank: Annotated[
        int | None,
        typer.Option(
            "--data-parallel-start-rank",
            "-dpr",
            help="First rank of this node: hybrid mode (or the first engine of a headless node).",
            rich_help_panel=PARALLEL,
        ),
    ] = None,
    data_parallel_size_local: Annotated[
        int | None,
        typer.Option(
            "--data-parallel-size-local", "-dpl", help="Engines of this node.", rich_help_panel=PARALLEL
        ),
    ] = None,
    data_parallel_address: Annotated[
        str | None,
        typer.Option(
            "--data-parallel-address",
            "-dpa",
            help="Where the other ranks reach rank 0. Default: 127.0.0.1.",
            rich_help_panel=PARALLEL,
        ),
    ] = None,
    data_parallel_rpc_port: Annotated[
        int,
        typer.Option(
            "--data-parallel-rpc-port",
            "-dpp",
            help="Handshake port of rank 0, the same on every rank; each group needs its own.",
            rich_help_panel=PARALLEL,
        ),
    ] = 29_550,
    data_parallel_external_lb: Annotated[
        bool,
        typer.Option(
            "--data-parallel-external-lb",
            "-dpe",
            help="External mode; giving a rank means it already.",
            rich_help_panel=PARALLEL,
        ),
    ] = False,
    data_parallel_hybrid_lb: Annotated[
        bool,
        typer.Option(
            "--data-parallel-hybrid-lb",
            "-dph",
            help="Hybrid mode: balance inside this node, from outside between nodes.",
            rich_help_panel=PARALLEL,
        ),
    ] = False,
    dp_sync_interval: Annotated[
        int,
        typer.Option(
            help="Steps between two agreements whether the group still has work; the same on every rank.",
            rich_help_panel=PARALLEL,
        ),
    ] = 16,
    cpu_distributed_timeout_seconds: Annotated[
        float,
        typer.Option(help="How long a step waits for a missing rank.", rich_help_panel=PARALLEL),
    ] = 1_800.0,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests in one batch.", rich_help_panel=SCHEDULER)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            help="Token budget of a step: how long a step can get, and so how long decoding can stall.",
            rich_help_panel=SCHEDULER,
        ),
    ] = 2_048,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="More requests under way get 503.", rich_help_panel=SCHEDULER)
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(help="At this many prompt tokens not yet prefilled: 503.", rich_help_panel=SCHEDULER),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool, typer.Option(help="Prompts may be split over steps.", rich_help_panel=SCHEDULER)
    ] = True,
    long_prefill_token_threshold: Annotated[
        int,
        typer.Option(help="Largest chunk of one prompt; 0: no such bound.", rich_help_panel=SCHEDULER),
    ] = 0,
    scheduling_policy: Annotated[
        SchedulingPolicy,
        typer.Option(
            parser=one_of(get_args(SchedulingPolicy)),
            metavar=shown(get_args(SchedulingPolicy)),
            help="First come, or `priority` of the request.",
            rich_help_panel=SCHEDULER,
        ),
    ] = "fcfs",
    prefill_schedule_interval: Annotated[
        int,
        typer.Option(
            help="New prefills only every N lock-steps, on all ranks at once.", rich_help_panel=SCHEDULER
        ),
    ] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=SCHEDULER)] = 16,
    num_gpu_blocks: Annotated[
        int,
        typer.Option(
            "--num-gpu-blocks",
            "--num-gpu-blocks-override",
            help="KV blocks; the default holds 2 million tokens.",
            rich_help_panel=SCHEDULER,
        ),
    ] = 131_072,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse blocks of equal prompt beginnings.", rich_help_panel=SCHEDULER)
    ] = True,
    kv_events_config: Annotated[
        str | None,
        typer.Option(
            help='JSON, e.g. \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\': tell what '
            "the prefix cache holds. The port is raised by the rank.",
            rich_help_panel=SCHEDULER,
        ),
    ] = None,
    model_kind: Annotated[
        ModelKind | None,
        typer.Option(
            parser=one_of(get_args(ModelKind)),
            metavar=shown(get_args(ModelKind)),
            help="moe: the group steps in lock step. dense: engines are independent, and external mode is "
            "refused, as by vLLM. Default: moe if --data-parallel-size is above 1, else dense.",
            rich_help_panel=TIME,
        ),
    ] = None,
    time_model_preset: Annotated[
        str | None,
        typer.Option(
            help=f"Named set of step costs to start from: {', '.join(PRESETS)}. Default: {DEFAULT_PRESET}.",
            rich_help_panel=TIME,
        ),
    ] = None,
    step_fixed_ms: Annotated[
        float | None, typer.Option(help="Cost of any step.", rich_help_panel=TIME)
    ] = None,
    prefill_us_per_token: Annotated[
        float | None, typer.Option(help="Cost per prompt token computed in a step.", rich_help_panel=TIME)
    ] = None,
    decode_us_per_sequence: Annotated[
        float | None, typer.Option(help="Cost per sequence that generates a token.", rich_help_panel=TIME)
    ] = None,
    kv_ns_per_token: Annotated[
        float | None, typer.Option(help="Cost per resident KV token.", rich_help_panel=TIME)
    ] = None,
    dummy_step_ms: Annotated[
        float | None,
        typer.Option(
            help="Cost of a step without own work in a running group. Default: the fixed cost.",
            rich_help_panel=TIME,
        ),
    ] = None,
    step_jitter: Annotated[
        float | None,
        typer.Option(help="Each step varies by this share, up or down; seeded.", rich_help_panel=TIME),
    ] = None,
    slowdown: Annotated[
        float, typer.Option(help="Every step takes this many times as long.", rich_help_panel=TIME)
    ] = 1.0,
    time_scale: Annotated[
        float,
        typer.Option(
            help="Model seconds per real second, the same on every rank: 10 runs ten times as fast.",
            rich_help_panel=TIME,
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the jitter.", rich_help_panel=TIME)] = 0,
    load_balancing_score: Annotated[
        LoadBalancingScore,
        typer.Option(
            parser=one_of(get_args(LoadBalancingScore)),
            metavar=shown(get_args(LoadBalancingScore)),
            help="Internal and hybrid mode: vLLM 0.32's score, or the original waiting × 4 + running.",
            rich_help_panel=EVALUATION,
        ),
    ] = "current",
    on_peer_death: Annotated[
        PeerDeathPolicy,
        typer.Option(
            parser=one_of(get_args(PeerDeathPolicy)),
            metavar=shown(get_args(PeerDeathPolicy)),
            help="When another rank dies: exit too, or hang with /health 200. Both happen in reality.",
            rich_help_panel=EVALUATION,
        ),
    ] = "exit",
    enable_fault_injection: Annotated[
        bool,
        typer.Option(
            "--enable-fault-injection",
            help="Offer POST /fault_injection: deaths, hangs, drains, delays. Never on a shared network.",
            rich_help_panel=EVALUATION,
        ),
    ] = False,
    step_trace: Annotated[
        str | None,
        typer.Option(
            help="Write one JSON line per step to this file; {rank} stands for the engine's rank.",
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    handshake_timeout_seconds: Annotated[
        float, typer.Option(help="How long an engine waits for rank 0.", rich_help_panel=EVALUATION)
    ] = 300.0,
    engine_ready_timeout_seconds: Annotated[
        float, typer.Option(help="How long a server waits for its engines.", rich_help_panel=EVALUATION)
    ] = 600.0,
    coordinator_start_timeout_seconds: Annotated[
        float, typer.Option(help="How long rank 0 waits for its coordinator.", rich_help_panel=EVALUATION)
    ] = 120.0,
    engine_dead_grace_seconds: Annotated[
        float,
        typer.Option(
            help="How long a server without engine answers 503 before it exits.", rich_help_panel=EVALUATION
        ),
    ] = 5.0,
) -> None:
    """Run one embedded rank: an OpenAI-compatible server that queues, batches and steps like a vLLM rank.

    It models time instead of running a network, and generates placeholder text: for development and
    evaluation. `vllm serve` is the production engine, and understands the same options.

    \b
    A group of two ranks in external load-balancer mode, each in its own terminal:
      wavegate rank --data-parallel-size 2 --data-parallel-rank 0
      wavegate rank --data-parallel-size 2 --data-parallel-rank 1
    """
    arguments = {name: value for name, value in locals().items() if value is not None}
    from vllm_ranks.engine.derivation import ConfigError, create_rank_config
    from vllm_ranks.engine.launcher import run_rank

    try:
        config = create_rank_config(msgspec.convert(arguments, RankArguments))
    except ConfigError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(run_rank(config))


if __name__ == "__main__":
    app()
