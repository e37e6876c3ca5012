"""What scheduler and worker tell each other. Both travel as one attribute on vLLM's own step messages.

vLLM pickles `SchedulerOutput` and `ModelRunnerOutput` with their whole `__dict__`, so no channel of our own is
needed, and an order can never meet the wrong step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ATTRIBUTE = "outrider"
LEAST_CATCH_UP_TOKENS = 2
"""A shorter hole waits for the next step, which lengthens it: the worker's pass takes no fewer tokens of a request."""


class CatchUp(NamedTuple):
    """Tokens of a request that the neural draft has not seen. Their ids travel along: in asynchronous scheduling the
    worker's own copy has placeholders where the scheduler knows better."""

    request_id: str
    start: int
    """Position of the first one."""
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Scheduler to worker: what to propose at the end of this step."""

    draft_tokens: int
    """K; 0 for no proposals."""
    run_neural: bool
    """Whether the neural draft's forward runs."""
    neural_tokens: int = 0
    """Tokens that it proposes; 0: its first pass only, which keeps its KV whole."""
    drafters: Mapping[str, str] = field(default_factory=dict)
    """Id of a request -> the drafter whose proposals it gets; the others get none."""
    stand_in_for: frozenset[str] = frozenset()
    """Those of them that get the neural drafter's proposals where their own drafter finds nothing."""
    catch_ups: tuple[CatchUp, ...] = ()
    """What the neural draft runs over before that, to close holes in its KV."""


@dataclass(slots=True)
class StepReport:
    """Worker to scheduler: what the step took. Filled in while the step runs."""

    target_s: float = float("nan")
    """Target forward with sampling; NaN where it is not measured (GPU, asynchronous)."""
    draft_s: dict[str, float] = field(default_factory=dict)
    """Drafter -> what it took; absent where it did not run, or was not timed (asynchronous scheduling)."""
    neural_ran: bool = False
    """The neural draft's forward ran to its end."""
    catch_up_s: float | None = None
    """What closing holes took, which draft_s does not hold; None as there."""
    caught_up: bool = False
    """What the order told the draft to catch up on is in its KV."""
    stood_in_for: tuple[str, ...] = ()
    """Requests that got the neural drafter's proposals because their own drafter found nothing."""
    failures: dict[str, str] = field(default_factory=dict)
    """Drafter -> why it failed, in a sentence; its proposals of this step were dropped."""
    proposals: Any = None
    """vLLM's DraftTokenIds, where they come with the step's output; None where none were asked for, or vLLM asks for
    them by itself."""


def attach(message: Any, content: DraftOrder | StepReport) -> None:
    setattr(message, ATTRIBUTE, content)


def attached_order(scheduler_output: Any) -> DraftOrder | None:
    """None for vLLM's own dummy steps (warm-up, profiling of memory)."""
    return getattr(scheduler_output, ATTRIBUTE, None)


def attached_report(model_runner_output: Any) -> StepReport | None:
    return getattr(model_runner_output, ATTRIBUTE, None)
