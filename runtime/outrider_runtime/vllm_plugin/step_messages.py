"""Token counts of a step, read from vLLM's messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from outrider_runtime.control.batch import Ints
from outrider_runtime.loop.request_table import Delivery, End
from outrider_runtime.loop.steps import NOTHING_SCORED, ChainCounts
from outrider_runtime.vllm_plugin.messages import StepReport

ENDS = {FinishReason.ABORT: End.LEFT, FinishReason.ERROR: End.FAILED, None: None}
"""Ends by vLLM's reason; all other reasons mean a complete answer."""


def chain_counts(
    scheduler_output: SchedulerOutput, output: ModelRunnerOutput, report: StepReport | None
) -> ChainCounts:  # fmt: skip
    """Return the step's counts; placeholders that a grammar ruled out are not scored."""
    proposals, names = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_scheduled_tokens
    if not proposals:
        return NOTHING_SCORED
    scheduled = np.array([len(proposals.get(name, ())) for name in names], np.int64)
    ran, trimmed = scheduled, None
    if report is not None and report.verified is not None:
        ran = np.where(scheduled > 0, report.verified, 0).astype(np.int64)
        trimmed = scheduled - ran
    scored, invalid = ran, scheduler_output.num_invalid_spec_tokens
    if invalid:
        scored = np.minimum(ran, scheduled - np.array([invalid.get(name, 0) for name in names], np.int64))
    return ChainCounts(_sampled(output, names), scored, trimmed)


def _sampled(output: ModelRunnerOutput, names: Iterable[str]) -> Ints:
    """(N,): tokens that the model sampled for each request."""
    sampled, row = output.sampled_token_ids, output.req_id_to_index
    return np.array([len(sampled[row[name]]) if sampled else 1 for name in names], np.int64)


def deliveries(outputs: Mapping[int, EngineCoreOutputs]) -> list[Delivery]:
    """Return the tokens that are sent to users."""
    return [
        (output.request_id, len(output.new_token_ids), ENDS.get(output.finish_reason, End.COMPLETE))
        for client in outputs.values()
        for output in client.outputs
    ]
