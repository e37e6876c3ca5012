"""Decisions only: which drafters run at each engine step, how far, and what the target scores of what they propose.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own.

    controller       the entry point
    verify, propose  its two decisions
    choices          the best drafters for a batch, as things are or as they would be with other caches
    evidence         what finished steps teach

    data             what passes between an engine and the core
    settings         what a controller is built from, and what of it is in force
    cost             what a step takes
    acceptance       what is accepted
    value            gain against cost, and lambda, the price of a second
    selection        the best nodes for the target to score; the best drafters, passes, widths and askers
    slo, admission   classes: who comes first, who is held back
    caches           whose cache is fed, and when
    trial_schedule   probes and explorations: what is tried, when, at what cost
    speedup          what probes say that speculation really buys
    state            what is counted
"""
