"""Token counts of a step, read from vLLM's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from outrider_runtime.loop.request_table import Delivery, End
from outrider_runtime.vllm_plugin.messages import StepReport

ENDS = {FinishReason.ABORT: End.LEFT, FinishReason.ERROR: End.FAILED}
"""Ends by vLLM's reason; all other reasons mean a complete answer."""


def verified_counts(scheduler_output: SchedulerOutput, report: StepReport | None) -> dict[str, int]:
    """Return the placeholders that the step ran, by request."""
    proposals = scheduler_output.scheduled_spec_decode_tokens
    scheduled = {name: len(tokens) for name, tokens in proposals.items()}
    if report is None or report.verified is None:
        return scheduled
    verified = zip(scheduler_output.num_scheduled_tokens, report.verified.tolist(), strict=True)
    return {name: count for name, count in verified if name in scheduled}


def scored_counts(scheduler_output: SchedulerOutput, verified: Mapping[str, int]) -> dict[str, int]:
    """Return the placeholders that the target scores, by request, without those that a grammar ruled out."""
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    proposals = scheduler_output.scheduled_spec_decode_tokens
    return {name: min(verified[name], len(tokens) - invalid.get(name, 0)) for name, tokens in proposals.items()}


def trimmed_counts(scheduler_output: SchedulerOutput, verified: Mapping[str, int]) -> dict[str, int]:
    """Return the scheduled placeholders that the step did not run, by request, if there are any."""
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    return {name: len(scheduled[name]) - ran for name, ran in verified.items() if ran < len(scheduled[name])}


def sampled_counts(output: ModelRunnerOutput, names: Iterable[str]) -> dict[str, int]:
    if not output.sampled_token_ids:
        return {}
    return {name: len(output.sampled_token_ids[output.req_id_to_index[name]]) for name in names}


def deliveries(outputs: Mapping[int, EngineCoreOutputs]) -> Iterator[Delivery]:
    """Yield the tokens that are sent to users."""
    for client in outputs.values():
        for output in client.outputs:
            reason = output.finish_reason
            end = None if reason is None else ENDS.get(reason, End.COMPLETE)
            yield Delivery(output.request_id, len(output.new_token_ids), end)
