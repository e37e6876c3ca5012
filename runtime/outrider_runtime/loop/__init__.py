"""What every engine shares of the control loop, between its scheduler and the decisions of `control`.

The requests' slots and clocks, columns of a batch, what was proposed, plans to orders, what came of a step, the pod's
state and its mounted files. No engine is imported here.

    Stepper       what an engine's scheduler calls at every step
    ControlLoop   the controller behind a lock, with what only the engine's side counts
    Reporter      the thread that writes the state and picks up changed files
"""
