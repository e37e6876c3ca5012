"""Outrider's control loop inside vLLM: what the engine is started with, and what runs in it.

- `launch`, `arguments`, `environment`, `versions`: before the engine exists (the server and the profiler call
  these).
- `scheduler`, `loop`, `coverage`, `steps`, `requests`, `slo`, `waiting`: in the engine core process: decide, observe,
  count.
- `reporter`, `profiles`: its daemon thread: write the state, pick up changed config and profiles.
- `cpu_worker`, `gpu_worker`, `runner`, `speculator`, `drafting_step`, `agreement`: in the worker process:
  carry out what was decided, measure it.
- `eagle_head`, `draft_model`, `prompt_lookup`, `sparse_self`, `short_tables`, `layer_names`: there, too: the members
  of the pool.
- `cpu`: there, too: what stands in for the kernels of a GPU.
- `messages`: what travels between the two on vLLM's own step messages.
"""
