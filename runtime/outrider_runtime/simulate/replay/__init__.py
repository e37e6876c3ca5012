"""Replays the same requests, recording and world under any policy, on a virtual clock: paired, without noise.

- `engine`: steps as vLLM's.
- `step_scheduler`: which tokens run in a step.
- `device`: runs a scheduled step.
- `replay_caches`: tokens that each drafter's cache covers.
- `recorded_proposals`: what drafters propose, and how much of it the target accepts.
- `policies`: baselines; Outrider's own policy is `control.controller`.
"""
