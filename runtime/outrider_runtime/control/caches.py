"""A drafter's cache (TurboSpec section 4.2): feed it what it misses now, later, or never?

A draft model can be fed later what it missed: so it is fed when it is asked, where what it will bring over the rest of
the answer exceeds the forward over what is missing. A head reads the target's hidden states, which are gone after the
step: a prompt is read then or never, and it is read while the head is in use. What the choice has passed over for some
decisions in a row, as load makes it do, is gated: it does not run, and a step costs what plain decoding costs. It is
open again once it is chosen.

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
from outrider_runtime.control.selection.offers import HOLE_TOKENS
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.slo import UnderWay, clocks, expected_rest, slack_s

SHORT_TOKENS = 256
"""Of holes that may be closed to find out what that buys."""
LEAST_CHUNK_TOKENS = 32
"""A part of a hole that is shorter would mostly pay for the call, and the hole grows at every step."""
STEP_TOKENS = 2.0
"""That a request is taken to be given in a step that speculates."""
HOLD_LOOKS = 8
"""Looks in a row at which nobody asks a drafter before it is gated."""


LOOK_EVERY_STEPS = 8
"""Steps between two looks at what draft models would bring to requests whose caches have holes."""


class DraftKV:
    """Whose cache is fed with what."""

    def __init__(self, settings: Settings, evidence: Evidence, choices: Choices, under_way: UnderWay) -> None:
        self._evidence, self._choices, self._since_look, self._under_way = evidence, choices, 0, under_way
        self._idle = np.zeros(len(settings.drafters), np.int64)
        self.needs_kv = np.array([drafter.needs_kv for drafter in settings.drafters], dtype=bool)
        self._hidden = np.array([drafter.needs_hidden for drafter in settings.drafters], dtype=bool)
        self._catches_up = self.needs_kv & ~self._hidden
        """(D,): drafters whose KV gaps can be fed later; a block drafter's cannot, as hidden states are gone."""

    @property
    def gated(self) -> Bools:
        """(D,): the drafters that read and are not fed."""
        return np.asarray((self.needs_kv | self._hidden) & (self._idle >= HOLD_LOOKS))

    @property
    def columns(self) -> tuple[Ints, Bools, Bools]:
        """As `feed` takes them."""
        return self._idle, self.needs_kv, self._hidden

    def holes(self, batch: Batch, rows: Ints, most: int = HOLE_TOKENS) -> Bools:
        """(D, N): more is missing than `most` tokens, and the drafter proposes junk over it."""
        return np.asarray((batch.missing[:, rows] > most) & self.needs_kv[:, None])

    def close(self, batch: Batch) -> tuple[Choice, Ints]:
        """The best choice after those holes in draft models' caches are closed that it pays to close, and (D, N) what
        is fed for that. Gates look at what would be chosen if no cache had a hole."""
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
        return self._choices.best(batch, closed, goodput=choice.goodput), closing

    def look(self, choice: Choice) -> None:
        """One decision by goodput, as it would be if no cache had a hole."""
        if choice.drafter_order.shape[1] and not choice.for_slo and not self._evidence.trials.off:
            _look(self._idle, choice.passes)

    def _closing(self, batch: Batch, choice: Choice) -> Ints:
        """(D, N): what draft models are fed of holes, where that pays."""
        all_fed = np.where(self._catches_up[:, None], batch.missing, 0)
        whole = self._choices.best(batch, all_fed, goodput=choice.goodput)
        self.look(whole)
        rows, pool = self._choices.pool(batch, choice.goodput)
        missing = np.ascontiguousarray(batch.missing[:, rows])
        costs = pool.price.rate * feeding_s(self._evidence.latency.costs, missing, float(len(rows)))
        closing = nothing_fed(batch)
        room = feeding_room(
            batch.columns, self._evidence.latency.columns, self._choices.force.tpots_s, self._under_way.expected,
            self._under_way.drafts_s, batch.token_budget,
        )  # fmt: skip
        closing[:, rows] = self._newcomers(batch, rows, whole, choice, costs, room)
        if closing.any():
            after = self._choices.best(batch, np.where(closing > 0, batch.missing, 0), goodput=choice.goodput)
            fed = closing[:, rows] > 0
            gain = (after.value - choice.value) * _steps_left(batch, rows)[fed.any(axis=0)].mean()
            if not gain > costs[fed].sum():  # of all of it together
                return nothing_fed(batch)
        return closing

    def _newcomers(
        self, batch: Batch, rows: Ints, whole: Choice, now: Choice, costs: Floats, room: Ints
    ) -> Ints:  # fmt: skip
        """(D, N): tokens, from the first missing one on, that draft models run over at the end of this step so that
        they can serve who has a hole. What the step's budget of tokens does not hold is left for later ones.

        whole: the choice if nobody's cache had a hole; now: as things are. costs: (D, N), tokens that feeding a drafter
        with all that it misses of a request is worth. room: (D,), see `feeding_room`.

        Two gains must pay for feeding a newcomer: what the newcomers add, by their number, and what all who are served
        gain over the best choice without such drafters, by theirs. By the first alone each would be fed for passes that
        run anyway, and all together would not pay for the passes.
        """
        feed = np.zeros(costs.shape, np.int64)
        asks = (whole.drafter_order[:, None] == np.arange(len(costs))[:, None]).any(axis=0) & self._catches_up[
            :, None
        ]  # (D, N)
        wanted = asks & self.holes(batch, rows)
        if not wanted.any():
            return feed
        without = self._choices.best(batch, nothing_fed(batch), caches=False, goodput=now.goodput)
        beside, on_average = whole.value - now.value, whole.value - without.value
        gain = min(beside / wanted.sum(), on_average / asks.sum())  # tokens a step, for each of the newcomers
        pays = wanted & (gain * _steps_left(batch, rows) > costs)
        budget = batch.token_budget
        for drafter, row in sorted(np.argwhere(pays).tolist(), key=lambda one: float(costs[one[0], one[1]])):
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
    """(D,): most tokens, up to `budget`, that a step may feed to each drafter so that no request misses its TPOT for
    it. Prompts have the same rule: what lengthens the step by a fifth is always fed, and late requests limit nothing.

    columns, costs: as `Columns`, `Costs`. expected, drafts_s: as in `UnderWay`.
    """
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
    """(N,): steps that answers are taken to go on for."""
    return expected_rest(batch.left[rows].astype(float), batch.emitted[rows].astype(float)) / STEP_TOKENS


@compiled
def _look(idle: Ints, passes: Ints) -> None:
    for d in range(len(idle)):
        idle[d] = 0 if passes[d] > 0 else idle[d] + 1


@compiled
def feed(
    missing: Ints, prompt: Ints, passes: Ints, closing: Ints, kv: tuple[Ints, Bools, Bools], usable: Bools, always: bool
) -> Ints:
    """(D, N): all that drafters run over. passes: (D,), who proposes; closing: (D, N), who has a hole closed, or a part
    of one; kv: see `DraftKV.columns`; usable: (D,). always: whoever can be fed, is."""
    fed, (idle, needs_kv, hidden) = np.zeros(missing.shape, np.int64), kv
    for d in np.flatnonzero(usable):
        fed[d] = closing[d]
        reads = hidden[d] and idle[d] < HOLD_LOOKS
        for i in range(missing.shape[1]):
            if prompt[i] > 0:
                now = reads or (hidden[d] and passes[d] > 0)
            else:
                now = passes[d] > 0 and (hidden[d] or missing[d, i] <= HOLE_TOKENS)
            if (needs_kv[d] or hidden[d]) and (now or always):
                fed[d, i] = missing[d, i]
    return fed
