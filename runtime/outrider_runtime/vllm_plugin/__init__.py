"""Outrider's control loop inside vLLM, by the process that a module runs in.

Before the engine exists (server, profiler):
- `launch`, `arguments`, `environment`, `graphs`, `versions`: arguments and environment of vLLM.

Server:
- `bounded_input`: refuses requests that do not fit into the sampler's tables.
- `engine_core`, `cause`: carry the reason of an engine's end to the server.

Engine core:
- `scheduler`, `views`, `step_messages`, `draft_blocks`: `outrider_runtime.loop` in vLLM's scheduler.

Worker:
- `gpu_worker`, `cpu_worker`, `worker`, `runner`, `adapters`, `graph_lengths`, `device_ranking`: vLLM's step, timed.
- `speculator`, `pool_members`, `drafting_step`, `proposed`, `agreement`, `memory`, `draft_room`: the pool, which
  carries out orders.
- `broken_answers` (engine core): ends requests that are not finite, see `outrider_runtime.finite_weights`.
- `draft_model_member`, `eagle_head`, `mtp_head`, `block_draft`, `suffix_member`, `sparse_self_member`: its members.
  `suffix_search` finds the matches of a lookup.
- `confident`, `reads_layers`, `layer_names`, `whole_weights`, `short_tables`, `block_edges`: parts that members share.

Everywhere:
- `messages`: orders and reports on vLLM's own step messages.
- `versions`: what differs between the versions of vLLM.
- `patches`: all that is replaced in vLLM's own modules and objects.
- `cpu_executor`, and the package `outrider_cpu`: replacements for what CPUs lack.
"""
