"""What vLLM's CPU build lacks for a data-parallel group of a MoE model: two collectives, and a package name.

Installed into the separate vLLM environment (`make vllm-env`) as a distribution of its own, see
pyproject.toml; nothing in wavegate imports it.
"""
