"""Decisions only: which drafters run at each engine step, how far, and what the target scores of what they propose.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own.

    settings, batch, forest, plans   what passes between an engine and the core
    controller                       the entry point; verify and propose are its two decisions
    evidence                         what finished steps teach
    cost, fit, latency               what a step takes: the form, its coefficients, corrected online
    acceptance, trials, siblings     what is accepted: by depth, confidence, class, request; a node's later children
    value, drafters, trees, select   what is worth it: lambda, who runs how far, how wide, the nodes that are scored
    draft_kv                         whose cache is fed, and when
    slo, admission                   classes: who comes first, who is held back
    probes, explore                  what speculation really buys; what a drafter is worth that is passed over
    state                            what is counted
"""
