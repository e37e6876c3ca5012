"""Decisions only: which drafters run at each engine step, how far, and what the target scores of what they propose.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own.

    settings, batch, forest, plans   what passes between an engine and the core
    controller                       the entry point; verify and propose are its two decisions
    evidence                         what finished steps teach
    cost, fit, learned_cost          what a pass takes: the form, its coefficients from measurements
    latency, correction, deviations  corrected online; step_times: what steps and drafts take as believed now
    acceptance, trials, groups       what is accepted: by depth, confidence, class, request
    siblings, beams                  the same of trees: a node's later children, a beam's places
    value, offers                    lambda and the price; what the drafters offer, and to whom
    choices, drafters                who runs, how far, how wide: `candidates` are weighed; `sharing`: who asks whom
    select                           the nodes that are scored
    draft_kv                         whose cache is fed, and when
    slo, admission                   classes: who comes first, who is held back
    probes, explore                  what speculation really buys; what a drafter is worth that is passed over
    state                            what is counted
"""
