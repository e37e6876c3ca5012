"""Offline profiling: measures step times on this hardware, fits the latency model, and reports the model's error.

- `grid`: chooses the shapes to measure, the most informative first.
- `step_samples`: measured steps, and the summary of several steps of one shape.
- `engines`: adapts each engine to one interface; `driver`: brings an engine to a shape and times its steps.
- `host`: the engine process, which measures; `remote`: the profiler's handle of that process.
- `session`: measures with one engine: rounds over the grid within the time budget.
- `cost_fit`: fits one cost to measurements; `fitting`: fits those of all modes, with the error on held-out shapes.
- `documents`: makes the Job's result from them.
- `run`: chooses which engines to start and what each measures; a drafter that fails does not affect the others.
- `profile_report`: prints and plots a profile for users. `main`: the command.
"""
