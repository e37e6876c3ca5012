"""vLLM's messages about a step, as plain data: what was scheduled, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from outrider_runtime.loop.request_table import Delivery, End
from outrider_runtime.vllm_plugin.messages import StepReport

ENDS = {FinishReason.ABORT: End.LEFT, FinishReason.ERROR: End.FAILED}
"""All others are complete."""


def verified_counts(scheduler_output: SchedulerOutput, report: StepReport | None) -> dict[str, int]:
    """Request -> placeholders that the step ran."""
    proposals = scheduler_output.scheduled_spec_decode_tokens
    scheduled = {name: len(tokens) for name, tokens in proposals.items()}
    if report is None or report.verified is None:
        return scheduled
    verified = zip(scheduler_output.num_scheduled_tokens, report.verified.tolist(), strict=True)
    return {name: count for name, count in verified if name in scheduled}


def scored_counts(scheduler_output: SchedulerOutput, verified: Mapping[str, int]) -> dict[str, int]:
    """Request -> placeholders that the target scores, without those that a grammar ruled out. verified: of the step."""
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    proposals = scheduler_output.scheduled_spec_decode_tokens
    return {name: min(verified[name], len(tokens) - invalid.get(name, 0)) for name, tokens in proposals.items()}


def trimmed_counts(scheduler_output: SchedulerOutput, verified: Mapping[str, int]) -> dict[str, int]:
    """Request -> placeholders that were scheduled and that the step did not run, where there are any."""
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    return {name: len(scheduled[name]) - ran for name, ran in verified.items() if ran < len(scheduled[name])}


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
