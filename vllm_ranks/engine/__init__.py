"""The embedded engine: vLLM's external data-parallel load-balancer mode around an executor that models time.

For development and evaluation; `vllm serve` is the production engine.
"""
