"""Launching real vLLM ranks: which commands, with which devices, and what their logs tell meanwhile."""
