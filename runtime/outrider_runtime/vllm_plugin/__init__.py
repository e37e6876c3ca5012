"""Outrider's control loop inside vLLM: what the engine is started with, and what runs in it.

- `launch`, `arguments`, `graphs`, `environment`, `versions`: before the engine exists (the server and the profiler call
  these).
- `bounded_input`: in the server's process: requests on their way to the engine.
- `engine_core`, `cause`: the engine core's process, and why it ended.
- `scheduler`, `views`, `step_messages`: in the engine core process: `outrider_runtime.loop` in vLLM's scheduler.
- `cpu_worker`, `gpu_worker`, `runner`, `adapters`, `verification`: in the worker process: vLLM's step, timed.
- `speculator`, `drafting_step`, `proposed`, `agreement`, `memory`: there, too: the pool, carrying out what was decided.
- `eagle_head`, `draft_model`, `prompt_lookup`, `sparse_self`, `short_tables`, `layer_names`, `whole_weights`: there,
  too: its members.
- `cpu`, `cpu_executor`: what CPUs lack.
- `messages`: what travels between scheduler and worker on vLLM's own step messages.
"""
