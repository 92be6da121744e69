"""The benchmarks: routing quality in virtual time and in wall clock, against every peer's formula.

They run the shipped decision objects and the embedded engine's own scheduler; nothing is modelled twice.
"""
