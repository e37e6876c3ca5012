"""Decisions only: which drafters run at each engine step, their draft lengths, and which proposals the target scores.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own.

    controller       the entry point
    verify, propose  its two decisions
    choices          the best drafters for a batch, with the drafters' caches as they are or after feeding them
    evidence         what finished steps teach

    data             what passes between an engine and the core
    settings         what a controller is built from, and which of it is in force
    cost             seconds of a step
    acceptance       probabilities that the target accepts proposals
    value            gain against cost, and lambda, the price of a second
    selection        the best nodes for the target to score; the best drafters, draft lengths, widths and requests
    slo, admission   SLO classes: which requests come first, which are held back
    caches           which drafters' caches are fed, and when
    trial_schedule   probes and explorations: what is tried, when, at what cost
    speedup          the speed-up of speculation, as probes measure it
    state            counters
"""
