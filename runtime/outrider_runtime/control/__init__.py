"""Decisions only: which drafters run at each engine step, how far, and what the target scores of what they propose.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own.

    settings, batch, forest, plans   what passes between an engine and the core
    controller                       the entry point; verify and propose are its two decisions
    evidence                         what finished steps teach: acceptance (trials), latency, probes
    value, select, drafters          what is worth it: lambda, the nodes that are scored, who runs how far
    slo, admission                   classes: who comes first, who is held back
"""
