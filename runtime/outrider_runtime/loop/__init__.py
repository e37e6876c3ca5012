"""The part of the control loop that all engines share, between an engine's scheduler and the decisions of `control`.

It keeps requests' slots and clocks, pending proposals, caches of drafters, steps in flight, the pod's state and its
mounted files. No engine is imported here.

    Stepper       what an engine's scheduler calls at every step
    ControlLoop   the controller behind a lock, and the engine's counters
    Reporter      the thread that writes the state and picks up changed files
"""
