"""Outrider's control loop inside vLLM (design, section 5): what the engine is started with, and what runs in it.

- `launch`, `pool`, `versions`: before the engine exists (the server and the profiler call these).
- `scheduler`, `loop`, `slo`, `reporter`: in the engine core process: decide, observe, count, write the state.
- `worker`, `runner`, `prompt_lookup`, `seeded`: in the worker process: carry out what was decided, measure it.
- `messages`: what travels between the two on vLLM's own step messages.
"""
