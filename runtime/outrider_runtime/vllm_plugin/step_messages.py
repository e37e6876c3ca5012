"""vLLM's messages about a step, as plain data: what was scheduled, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from outrider_runtime.loop.requests import Delivery, End

ENDS = {FinishReason.ABORT: End.LEFT, FinishReason.ERROR: End.FAILED}
"""All others are complete."""


def scored_counts(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Request -> places for proposals that the target scores, without those that a grammar ruled out."""
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    proposals = scheduler_output.scheduled_spec_decode_tokens
    return {name: len(tokens) - invalid.get(name, 0) for name, tokens in proposals.items()}


def sampled_counts(output: ModelRunnerOutput, names: Iterable[str]) -> dict[str, int]:
    if not output.sampled_token_ids:
        return {}
    return {name: len(output.sampled_token_ids[output.req_id_to_index[name]]) for name in names}


def deliveries(outputs: Mapping[int, EngineCoreOutputs]) -> Iterator[Delivery]:
    """What goes out to users."""
    for client in outputs.values():
        for output in client.outputs:
            reason = output.finish_reason
            end = None if reason is None else ENDS.get(reason, End.COMPLETE)
            yield Delivery(output.request_id, len(output.new_token_ids), end)
