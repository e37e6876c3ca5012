"""What vLLM's messages about a step say: what was scheduled, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


def scored_counts(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Request -> places for proposals that the target scores, without those that a grammar ruled out."""
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    proposals = scheduler_output.scheduled_spec_decode_tokens
    return {name: len(tokens) - invalid.get(name, 0) for name, tokens in proposals.items()}


def sampled_counts(output: ModelRunnerOutput, names: Iterable[str]) -> dict[str, int]:
    if not output.sampled_token_ids:
        return {}
    return {name: len(output.sampled_token_ids[output.req_id_to_index[name]]) for name in names}


def only_decodes(scheduler_output: SchedulerOutput) -> bool:
    """Each request of the step has had tokens before, gets one more, and verifies nothing."""
    going_on = scheduler_output.scheduled_cached_reqs
    requests = len(going_on.req_ids)
    return (
        not scheduler_output.scheduled_new_reqs
        and scheduler_output.total_num_scheduled_tokens == requests
        and all(going_on.num_output_tokens)
    )
