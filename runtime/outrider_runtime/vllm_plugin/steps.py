"""One engine step, from its plans to the outcome that the controller learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider_runtime.control.batch import (
    CatchUpOutcome,
    DraftPlan,
    ExecutionMode,
    Miss,
    RequestOutcome,
    RequestView,
    StepOutcome,
    VerifyPlan,
)
from outrider_runtime.vllm_plugin.coverage import ScheduledTokens
from outrider_runtime.vllm_plugin.messages import CatchUp, StepReport


class Asked(NamedTuple):
    """What a request's drafter was asked for at the end of the step before."""

    drafter: str
    draft_tokens: int
    proposed: int
    """Real proposals that came back."""
    missed: Miss | None = None

    def stood_in(self, drafter: str, draft_tokens: int) -> Asked:
        """`drafter` proposed instead of the one that was asked."""
        return Asked(drafter, draft_tokens, draft_tokens, Miss(self.drafter, self.draft_tokens))


class StepSize(NamedTuple):
    """What the time of a step depends on, and which set of coefficients it belongs to."""

    n_context: int
    n_batched: int
    n_requests: int
    n_decoding: int
    n_context_query: float
    prefill_tokens: int
    mode: ExecutionMode


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was scheduled and whose output has not come in yet."""

    scheduled_at: float
    size: StepSize
    verify_plan: VerifyPlan
    draft_plan: DraftPlan
    asked: Sequence[tuple[RequestView, Asked]] = ()
    """Decoding requests that somebody was asked for, as plan_draft saw them."""
    ran: Sequence[ScheduledTokens] = ()
    """The same tokens as the draft's coverage was told of them; empty where that is not kept."""
    catch_ups: Sequence[CatchUp] = ()


def step_outcome(
    record: StepRecord,
    report: StepReport | None,
    sampled: Mapping[str, int],
    verified: Mapping[str, int],
    *,
    now: float,
    last_output_at: float,
    tokens: int,
) -> StepOutcome:
    """`sampled`: tokens that each request got, bonus token included; `verified`: proposals that were scored."""
    return StepOutcome(
        now=now,
        step_s=now - max(last_output_at, record.scheduled_at),
        target_s=report.target_s if report is not None else float("nan"),
        tokens=tokens,
        verify_plan=record.verify_plan,
        draft_plan=record.draft_plan,
        requests=tuple(_request(view, asked, sampled, verified) for view, asked in record.asked),
        draft_s=dict(report.draft_s) if report is not None else {},
        catch_up=_caught_up(record.catch_ups, report),
        **record.size._asdict(),
    )


def step_size(views: Sequence[RequestView], counts: Mapping[str, int], largest_graph_tokens: int | None) -> StepSize:
    """`counts`: tokens that each request has in the step."""
    return StepSize(
        n_context=sum(view.context_tokens for view in views),
        n_batched=sum(counts.values()),
        n_requests=len(views),
        n_decoding=sum(not view.prefill_tokens for view in views),
        n_context_query=sum(view.context_tokens * counts[view.id] for view in views) / 1000,
        prefill_tokens=sum(view.prefill_tokens for view in views),
        mode=execution_mode(views, counts, largest_graph_tokens),
    )


def plain_step_size(context_tokens: Sequence[int], largest_graph_tokens: int | None) -> StepSize:
    """`step_size` where each request decodes, and verifies nothing."""
    requests, context = len(context_tokens), sum(context_tokens)
    beyond = largest_graph_tokens is not None and requests > largest_graph_tokens
    mode = ExecutionMode.BEYOND_GRAPH if beyond else ExecutionMode.UNIFORM
    return StepSize(context, requests, requests, requests, context / 1000, 0, mode)


def execution_mode(
    views: Sequence[RequestView], counts: Mapping[str, int], largest_graph_tokens: int | None
) -> ExecutionMode:
    """Which set of coefficients a step belongs to."""
    if largest_graph_tokens is not None and sum(counts.values()) > largest_graph_tokens:
        return ExecutionMode.BEYOND_GRAPH
    uniform = len(set(counts.values())) == 1 and not any(view.prefill_tokens for view in views)
    return ExecutionMode.UNIFORM if uniform else ExecutionMode.RAGGED


def _request(
    view: RequestView, asked: Asked, sampled: Mapping[str, int], verified: Mapping[str, int]
) -> RequestOutcome:
    scored = verified.get(view.id, 0)
    return RequestOutcome(
        id=view.id,
        slo_class=view.slo_class,
        drafter=asked.drafter,
        asked=asked.draft_tokens,
        proposed=max(asked.proposed, scored),
        verified=scored,
        accepted=min(scored, max(0, sampled.get(view.id, 0) - 1)),
        missed=asked.missed,
    )


def _caught_up(holes: Sequence[CatchUp], report: StepReport | None) -> CatchUpOutcome | None:
    if not holes or report is None or not report.caught_up:
        return None
    return CatchUpOutcome(
        tokens=sum(len(one.token_ids) for one in holes),
        n_requests=len(holes),
        n_context=sum(one.start for one in holes),
        n_context_query=sum(one.start * len(one.token_ids) for one in holes) / 1000,
        seconds=report.catch_up_s if report.catch_up_s is not None else float("nan"),
    )
