"""The embedded engine: vLLM's external data-parallel load-balancer mode around an executor that models time.

For development and evaluation; `vllm serve` is the production engine.

One request's way, in the order in which to read:

    launcher, engine_launch     which processes there are; processes starts and ends them
    handshake                   how engines and front ends find each other
    api_server → openai_serving HTTP to generation and back (openai_requests, _checks, _responses; text)
    front_end                   ids, queue limits, abort; output_processor turns tokens into deltas
    client, client_lb           requests to an engine, first requests to the coordinator
    engine_process, engine_loop inputs → step → outputs → agreement (engine_build puts the parts together)
      core                      one rank without a clock: scheduler, kv_cache, time_model, waves
      executor, collective      the step's time, and the wait for the slowest rank
      step_outputs              tokens and statistics back to the front end
    coordinator                 sockets around waves.CoordinatorState

wire holds every message, arguments and derivation the options; virtual runs the same core in virtual time.
"""
