"""Decisions only: which drafters run at each engine step, how far, and what the target scores of what they propose.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own. `settings`, `batch`, `forest` and
`plans` hold what passes between an engine and the core; `controller` is the entry point.
"""
