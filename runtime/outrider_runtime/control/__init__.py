"""Decisions only: which drafters run at each engine step, their draft lengths, and which proposals the target scores.

Everything here is numpy arrays and numba: no engine, no I/O, no clock of its own.

    controller       the entry point
    verify, propose  its two decisions
    evidence         what finished steps teach
    arm_plans        both decisions for two pools in one engine, and what a step costs each request (`arm_prices`)

    batch, plans     what passes between an engine and the core
    pending_proposals  proposals that wait to be verified
    settings         what a controller is built from, and which of it is in force
    step_times       predicted seconds of a step
    observed_times   errors of the prediction, learned from each step
    acceptance       probabilities that the target accepts proposals, in chains and in `trees`
    value            gain against cost, and lambda, the price of a second
    draft_options    what each drafter can propose for each request, and its price
    choose_drafters  the best drafters, draft lengths, widths and requests
    slo, admission   SLO classes: which requests come first, which are held back
    trials           probes and explorations: what is tried, when, at what cost; the speed-up, as probes measure it
    state            counters

    compiled         machine code, kept on disk; `warm_up` compiles it
"""
