"""A drafter's KV gap (TurboSpec section 4.2): feed the missing tokens now, later, or never?

A draft model can be fed missing tokens later. So it is fed when it is about to propose, if its gain over the rest of
the answer exceeds the pass over the gap. A head reads the target's hidden states, which are gone after the step: it is
fed a prompt in the prompt's own step or never, and it is fed while it is in use. A drafter that several choices in a
row leave out, as happens under load, is disabled: it is not fed, and a step costs what plain decoding costs. It is
enabled again once it is chosen.

D drafters, N requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_runtime.control.admission import LEAST_PROMPT_SHARE
from outrider_runtime.control.choices import Choices
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.model import this_step, without_prompts
from outrider_runtime.control.cost.step_times import Costs, decode_s, fed_token_s, feeding_s
from outrider_runtime.control.data.batch import Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.selection.drafters import Choice
from outrider_runtime.control.selection.offers import GAP_TOKENS
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.slo import UnderWay, clocks, expected_rest, slack_s

SHORT_TOKENS = 256
"""Largest KV gap that is fed for a trial."""
LEAST_CHUNK_TOKENS = 32
"""Smallest part of a KV gap that is fed in one step: a shorter one would mostly pay for the call, while the gap grows
at every step."""
STEP_TOKENS = 2.0
"""Tokens that a request is assumed to get in a step that speculates."""
HOLD_LOOKS = 8
"""Looks in a row that leave a drafter out before it is disabled."""


LOOK_EVERY_STEPS = 8
"""Steps between two looks at what draft models would gain if their KV gaps were fed."""


class DraftKV:
    """Decides which drafters are fed which requests' tokens."""

    def __init__(self, settings: Settings, evidence: Evidence, choices: Choices, under_way: UnderWay) -> None:
        self._evidence, self._choices, self._since_look, self._under_way = evidence, choices, 0, under_way
        self._idle = np.zeros(len(settings.drafters), np.int64)
        self.needs_kv = np.array([drafter.needs_kv for drafter in settings.drafters], dtype=bool)
        self._hidden = np.array([drafter.needs_hidden for drafter in settings.drafters], dtype=bool)
        self._catches_up = self.needs_kv & ~self._hidden
        """(D,): drafters whose KV gaps can be fed later; a block drafter's cannot, since the hidden states are gone."""

    @property
    def disabled(self) -> Bools:
        """(D,): drafters with a cache that are not fed, since they were left out for a while."""
        return np.asarray((self.needs_kv | self._hidden) & (self._idle >= HOLD_LOOKS))

    @property
    def columns(self) -> tuple[Ints, Bools, Bools]:
        """Argument `kv` of `feed`."""
        return self._idle, self.needs_kv, self._hidden

    def gaps(self, batch: Batch, rows: Ints, most: int = GAP_TOKENS) -> Bools:
        """(D, N): the drafter's cache lacks more than `most` tokens, so that its proposals would be junk."""
        return np.asarray((batch.missing[:, rows] > most) & self.needs_kv[:, None])

    def close(self, batch: Batch) -> tuple[Choice, Ints]:
        """The best choice after feeding those KV gaps of draft models that it pays to feed, and (D, N) the tokens fed
        for that. Whether a drafter is disabled depends on what would be chosen if no cache had a gap."""
        nothing = nothing_fed(batch)
        choice = self._choices.best(batch, nothing)
        self._since_look += 1
        if not choice.has_gaps or self._evidence.trials.off:
            self.look(choice)
            return choice, nothing
        if self._since_look < LOOK_EVERY_STEPS and not choice.passes[self._catches_up].any():
            return choice, nothing
        self._since_look = 0
        closing = self._closing(batch, choice)
        if not closing.any():
            return choice, nothing
        closed = np.where(closing >= batch.missing, closing, 0)
        return self._choices.best(batch, closed, lambda_over_plain=choice.lambda_over_plain), closing

    def look(self, choice: Choice) -> None:
        """Count, for each drafter, a choice that would leave it out even if no cache had a gap. Choices for late
        requests do not count."""
        if choice.drafter_order.shape[1] and not choice.for_slo and not self._evidence.trials.off:
            _look(self._idle, choice.passes)

    def _closing(self, batch: Batch, choice: Choice) -> Ints:
        """(D, N): tokens of KV gaps that draft models are fed because that pays."""
        all_fed = np.where(self._catches_up[:, None], batch.missing, 0)
        whole = self._choices.best(batch, all_fed, lambda_over_plain=choice.lambda_over_plain)
        self.look(whole)
        rows, pool = self._choices.pool(batch, choice.lambda_over_plain)
        missing = np.ascontiguousarray(batch.missing[:, rows])
        costs = pool.price.rate * feeding_s(self._evidence.latency.costs, missing, float(len(rows)))
        closing = nothing_fed(batch)
        room = feeding_room(
            batch.columns, self._evidence.latency.columns, self._choices.force.tpots_s, self._under_way.expected,
            self._under_way.drafts_s, batch.token_budget,
        )  # fmt: skip
        closing[:, rows] = self._newcomers(batch, rows, whole, choice, costs, room)
        if closing.any():
            all_closed = np.where(closing > 0, batch.missing, 0)
            after = self._choices.best(batch, all_closed, lambda_over_plain=choice.lambda_over_plain)
            fed = closing[:, rows] > 0
            gain = (after.value - choice.value) * _steps_left(batch, rows)[fed.any(axis=0)].mean()
            if not gain > costs[fed].sum():  # all gaps together
                return nothing_fed(batch)
        return closing

    def _newcomers(
        self, batch: Batch, rows: Ints, whole: Choice, choice: Choice, costs: Floats, room: Ints
    ) -> Ints:  # fmt: skip
        """(D, N): tokens, from the first missing one on, that draft models are fed at the end of this step so that they
        can serve requests with a KV gap (newcomers). What exceeds the step's token budget is left for later steps.

        whole: the choice if no cache had a gap. choice: the one with the gaps as they are. costs: (D, N), price in
        tokens of feeding a drafter all that it lacks of a request. room: (D,), see `feeding_room`.

        A newcomer is fed if its price is below both of two gains per step: what the newcomers add / their number, and
        what all served requests gain over the best choice without such drafters / their number. By the first gain
        alone, each newcomer would be fed for passes that run anyway, and all together might not pay for those passes.
        """
        feed = np.zeros(costs.shape, np.int64)
        asks = (whole.drafter_order[:, None] == np.arange(len(costs))[:, None]).any(axis=0) & self._catches_up[
            :, None
        ]  # (D, N)
        newcomers = asks & self.gaps(batch, rows)
        if not newcomers.any():
            return feed
        without = self._choices.best(
            batch, nothing_fed(batch), caches=False, lambda_over_plain=choice.lambda_over_plain
        )  # fmt: skip
        added, in_all = whole.value - choice.value, whole.value - without.value
        gain = min(added / newcomers.sum(), in_all / asks.sum())  # tokens per step, for each newcomer
        pays = newcomers & (gain * _steps_left(batch, rows) > costs)
        budget = batch.token_budget
        for drafter, row in sorted(np.argwhere(pays).tolist(), key=lambda place: float(costs[place[0], place[1]])):
            missing = int(batch.missing[drafter, rows[row]])
            chunk = min(missing, budget, int(room[drafter]))
            if chunk >= min(missing, LEAST_CHUNK_TOKENS):
                feed[drafter, row] = chunk
                budget -= chunk
                room[drafter] -= chunk
        return feed


@compiled
def feeding_room(
    columns: tuple[Any, ...], costs: tuple[Any, ...], tpots_s: Floats, expected: Floats, drafts_s: float, budget: int
) -> Ints:
    """(D,): most tokens, up to `budget`, that a step may feed to each drafter without making a request miss its TPOT.

    The rule is that of prompts (`admission`): what lengthens the step by at most a fifth is always fed, and requests
    that are late anyway limit nothing. columns, costs: fields of `Columns`, `Costs`. expected, drafts_s: see
    `UnderWay`."""
    batch, known = Columns(*columns), Costs(*costs)
    room = np.full(len(known.drafts), budget)
    rows = np.flatnonzero(batch.prompt + batch.prompt_left == 0)
    state = clocks(batch, rows, tpots_s)
    if not np.isfinite(state.tpot_s).any():
        return room
    step_s = decode_s(known, without_prompts(this_step(batch)), 0.0) + drafts_s
    slack, spare_s = slack_s(state, step_s / (1.0 + expected[batch.slot[rows]])), np.inf
    for n in range(len(rows)):
        if slack[n] >= 0.0:
            spare_s = min(spare_s, slack[n])
    for d in range(len(room)):
        token_s = fed_token_s(known, d)
        if token_s > 0.0:
            room[d] = int(min(float(budget), max(spare_s, LEAST_PROMPT_SHARE * step_s) / token_s))
    return room


def nothing_fed(batch: Batch) -> Ints:
    return np.zeros(batch.missing.shape, np.int64)


def _steps_left(batch: Batch, rows: Ints) -> Floats:
    """(N,): steps that answers are assumed to go on for."""
    return expected_rest(batch.left[rows].astype(float), batch.emitted[rows].astype(float)) / STEP_TOKENS


@compiled
def _look(idle: Ints, passes: Ints) -> None:
    for d in range(len(idle)):
        idle[d] = 0 if passes[d] > 0 else idle[d] + 1


@compiled
def feed(
    missing: Ints, prompt: Ints, passes: Ints, closing: Ints, kv: tuple[Ints, Bools, Bools], usable: Bools, always: bool
) -> Ints:
    """(D, N): tokens that each drafter is fed of each request.

    passes: (D,), draft lengths. closing: (D, N), tokens of KV gaps to feed. kv: see `DraftKV.columns`. usable: (D,).
    always: feed all that can be fed.
    """
    fed, (idle, needs_kv, hidden) = np.zeros(missing.shape, np.int64), kv
    for d in np.flatnonzero(usable):
        fed[d] = closing[d]
        reads = hidden[d] and idle[d] < HOLD_LOOKS
        for i in range(missing.shape[1]):
            if prompt[i] > 0:
                is_fed = reads or (hidden[d] and passes[d] > 0)
            else:
                is_fed = passes[d] > 0 and (hidden[d] or missing[d, i] <= GAP_TOKENS)
            if (needs_kv[d] or hidden[d]) and (is_fed or always):
                fed[d, i] = missing[d, i]
    return fed
