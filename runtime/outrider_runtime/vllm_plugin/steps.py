"""One engine step, from its plans to the outcome that the controller learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
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
from outrider_runtime.vllm_plugin.messages import DraftOrder, DraftReport, StepReport


@dataclass(slots=True)
class Asked:
    """What a request's drafter was asked for at the end of a step; what came back is filled in when it is known."""

    drafter: str
    draft_tokens: int
    proposed: int
    """Real proposals that came back; all that were asked for until more is known."""
    missed: Miss | None = None

    def came_back(self, proposed: int, drafter: str | None, draft_tokens: int) -> None:
        """drafter: who made them, and what it was asked for; None: nobody found anything."""
        self.proposed = proposed
        if drafter is not None and drafter != self.drafter:
            self.missed = Miss(self.drafter, self.draft_tokens)
            self.drafter, self.draft_tokens = drafter, draft_tokens


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
    order: DraftOrder
    asked: Sequence[tuple[RequestView, Asked]] = ()
    """Decoding requests that somebody was asked for at the end of the step before, as plan_draft saw them."""
    asks: Sequence[Asked | None] = ()
    """Of each request, who is asked at the end of this one; empty where nobody is."""
    ran: Sequence[ScheduledTokens] = ()
    """The same tokens as the draft's coverage was told of them; empty where that is not kept."""


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
    """What is known when a step's output is there; `with_drafts` adds the rest.

    sampled: tokens that each request got, bonus token included; verified: places that were scored.
    """
    return StepOutcome(
        now=now,
        step_s=now - max(last_output_at, record.scheduled_at),
        target_s=report.target_s if report is not None else float("nan"),
        tokens=tokens,
        verify_plan=record.verify_plan,
        draft_plan=record.draft_plan,
        requests=tuple(_request(view, asked, sampled, verified) for view, asked in record.asked),
        **record.size._asdict(),
    )


def with_drafts(outcome: StepOutcome, record: StepRecord, report: DraftReport, names: Sequence[str]) -> StepOutcome:
    """`outcome` with what the drafters took at the end of the step; names: of the drafters, by number."""
    seconds = {name: float(taken) for name, taken in zip(names, report.seconds, strict=True) if not isnan(taken)}
    return replace(outcome, draft_s=seconds, catch_up=_caught_up(record, report))


def untimed(outcome: StepOutcome) -> StepOutcome:
    """`outcome` where a drafter ran, and nobody will tell for how long: nothing is to be learned from its time."""
    return replace(outcome, step_s=nan, target_s=nan)


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
    scored = min(verified.get(view.id, 0), asked.proposed)  # behind them is filler
    return RequestOutcome(
        id=view.id,
        slo_class=view.slo_class,
        drafter=asked.drafter,
        asked=asked.draft_tokens,
        proposed=asked.proposed,
        verified=scored,
        accepted=min(scored, max(0, sampled.get(view.id, 0) - 1)),
        missed=asked.missed,
    )


def _caught_up(record: StepRecord, report: DraftReport) -> CatchUpOutcome | None:
    holes = record.order.holes
    if not holes or isnan(report.catch_up_s):
        return None
    return CatchUpOutcome(
        tokens=sum(hole.end - hole.start for hole in holes),
        n_requests=len(holes),
        n_context=sum(hole.start for hole in holes),
        n_context_query=sum(hole.start * (hole.end - hole.start) for hole in holes) / 1000,
        seconds=report.catch_up_s,
    )
