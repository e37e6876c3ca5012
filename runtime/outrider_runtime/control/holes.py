"""What a hole in its KV costs the neural draft in acceptance: known of a draft model, measured of an EAGLE head.

A draft model proposes junk over a hole. An EAGLE head lives on the target's hidden states, and what a prompt it has not
read costs it depends on the head: one trained on SmolLM2 accepts 0.44 of its proposals with or without. Reading a
prompt with the head takes a tenth of the target's time for it, so the head reads some prompts and skips others until
the two kinds of request tell what that buys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from outrider_runtime.control.batch import Batch, RequestOutcome, RequestView

LEAST_TRIALS, ENOUGH_TRIALS = 20.0, 200.0
"""First proposals verified, for requests of either kind, before anything is concluded; before a loss that did not show
is taken to be none."""
SIGMAS = 2.0
MOST_TRIALS = 2000.0
"""Evidence beyond this fades, so that a change of traffic shows."""
MOST_LOSS = 0.1
"""Share of acceptance that a head may lose to holes before reading prompts pays: about what reading them takes."""
SHARE_TO_LEARN = 0.5
"""Of prompts that are read until then."""
SHARE_AFTERWARDS = 1 / 32
"""The same once reading is known to buy nothing, in case that changes with the traffic."""


@dataclass(slots=True)
class _Trials:
    tried: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: bool) -> None:
        keep = min(1.0, MOST_TRIALS / (self.tried + 1))
        self.tried, self.accepted = keep * (self.tried + 1), keep * (self.accepted + accepted)

    @property
    def share(self) -> float:
        return (self.accepted + 1) / (self.tried + 2)

    @property
    def relative_error(self) -> float:
        return math.sqrt((1 - self.share) / (self.share * (self.tried + 2)))


class HoleCost:
    """Whether a head's KV is worth keeping whole. The first position tells: it is tried whatever the draft length."""

    def __init__(self, neural: str, rng: np.random.Generator) -> None:
        self._neural = neural
        self._rng = rng
        self._whole, self._unread = _Trials(), _Trials()
        self._was_read: dict[str, bool | None] = {}
        """True: the head ran in every step of the request (what came from the prefix cache is taken to have been read);
        False: not over its prompt; None: over its prompt, but not in every step since."""
        self.matter = False
        """Holes cost more than they save, beyond doubt. From then on the head drafts like a draft model: for requests
        without a hole only, as acceptance over holes says nothing of what it can do."""

    def reads_next_prompt(self) -> bool:
        """Whether the head should read the prompts of a step: as evidence says, or to get some."""
        return self.matter or bool(self._rng.random() < (SHARE_AFTERWARDS if self.settled else SHARE_TO_LEARN))

    @property
    def settled(self) -> bool:
        """Holes are known not to matter."""
        return self._least_tried >= ENOUGH_TRIALS and not self.matter

    def ran(self, requests: Iterable[RequestView], *, neural: bool) -> None:
        """A step was planned; `neural`: the head's forward goes with it."""
        if not neural and True in self._was_read.values():  # hardly any running request is not in the step
            self._was_read = {name: False if read is False else None for name, read in self._was_read.items()}
        for view in requests:
            begins = view.id not in self._was_read or not view.context_tokens  # a preempted one begins anew
            if view.prefill_tokens and begins:
                self._was_read[view.id] = neural

    def observe(self, outcomes: Iterable[RequestOutcome]) -> None:
        for outcome in outcomes:
            read = self._was_read.get(outcome.id)
            if outcome.verified and outcome.drafter == self._neural and read is not None:
                trials = self._whole if read else self._unread
                trials.add(outcome.accepted > 0)
        self.matter = self.matter or self._is_loss()

    def with_holes(self, batch: Batch) -> Batch:
        """`batch` as the planner sees it: where holes matter, a request with one is not drafted for."""
        if not self.matter:
            return batch
        views = tuple(view._replace(draft_ready=self._is_whole(view)) for view in batch.requests)
        return replace(batch, requests=views)

    def forget(self, request_id: str) -> None:
        self._was_read.pop(request_id, None)

    def _is_whole(self, view: RequestView) -> bool:
        return self._was_read.get(view.id, view.prefill_tokens > 0) is True

    def _is_loss(self) -> bool:
        if self._least_tried < LEAST_TRIALS:
            return False
        left = self._unread.share / self._whole.share
        error = left * math.hypot(self._unread.relative_error, self._whole.relative_error)
        return 1 - left - SIGMAS * error > MOST_LOSS

    @property
    def _least_tried(self) -> float:
        return min(self._whole.tried, self._unread.tried)
