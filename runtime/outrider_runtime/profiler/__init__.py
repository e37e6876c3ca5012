"""Offline profiling: measure what steps cost on this hardware, fit the latency model, say how wrong it is.

- `grid`: which shapes are worth measuring, the most informative first.
- `samples`: what a measurement is, and what several of one shape come to.
- `engines`: what is measured, in one form for all; `driver`: brings an engine to a shape and times its steps.
- `host`: the engine process that runs the shapes; `remote`: the same, as its parent sees it.
- `session`: one engine start to finish: rounds over the grid within the time budget.
- `fitting`: samples to coefficients with their held-out error; `documents`: the same as the Job reports it.
- `run`: which engines to start and what each measures; one failing drafter costs the others nothing.
- `report`: the same for people. `main`: the command.
"""
