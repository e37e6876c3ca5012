"""A drafter's cache (TurboSpec section 4.2): feed it what it misses now, later, or never?

A draft model can be fed later what it missed: so it is fed when it is asked, where what it will bring over the rest of
the answer exceeds the forward over what is missing. A head reads the target's hidden states, which are gone after the
step: a prompt is read then or never. It is read until that is known not to pay, but for a short one now and then, so
that the two kinds of request tell. Under load nothing is read at all: the batch size at which a drafter stopped to
be chosen is its gate, with hysteresis, and it is forgotten from time to time, so that speculation comes back.

D drafters, N requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.drafters import Choice
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.slo import HORIZON_TOKENS, expected_rest

HOLE_TOKENS = 16
"""So little is missing after any step, and after a probe: no more than the first pass covers."""
SHORT_TOKENS = 256
"""Of prompts that may go unread, and of holes that may be closed, to find out what that buys."""
LEARN_SHARE = 1 / 16
"""Of the steps with nothing but short prompts."""
LEAST_TRIALS = 20.0
LEAST_CHUNK_TOKENS = 32
"""A part of a hole that is shorter would mostly pay for the call, and the hole grows at every step."""
HOLD_STEPS, REOPEN_LOOKS, REOPEN_SHARE, RESET_STEPS = 8, 2, 0.8, 400
"""Decisions in a row without the drafter before its gate closes; with it before it opens, or one below this share of
the threshold; decisions after which the threshold is forgotten."""


class Gate:
    """The batch size at which a drafter stopped to pay."""

    def __init__(self) -> None:
        self.threshold = np.inf
        self._idle = self._wanted = self._age = 0

    def closed(self, requests: int) -> bool:
        return requests >= self.threshold

    def look(self, requests: int, *, wanted: bool) -> None:
        """One decision by goodput. `wanted`: the drafter would be asked if its cache were whole."""
        self._age += 1
        self._idle = 0 if wanted else self._idle + 1
        self._wanted = self._wanted + 1 if wanted else 0
        if self._idle >= HOLD_STEPS:
            self.threshold = min(self.threshold, float(requests))
        reopens = self._wanted >= REOPEN_LOOKS or (wanted and requests < REOPEN_SHARE * self.threshold)
        if reopens or self._age >= RESET_STEPS:
            self.threshold, self._age, self._idle = np.inf, 0, 0


@dataclass(frozen=True, slots=True)
class Room:
    """How much one step bears."""

    tokens: int
    seconds: float
    """Infinite where no SLO class decodes."""


class DraftKV:
    """Whose cache is fed with what."""

    def __init__(self, drafters: Sequence[Drafter], rng: np.random.Generator) -> None:
        self._drafters, self._rng = drafters, rng
        self.gates = [Gate() for _ in drafters]
        self._kv = np.array([drafter.needs_kv for drafter in drafters], dtype=bool)
        self._hidden = np.array([drafter.needs_hidden for drafter in drafters], dtype=bool)
        self.any_kv = bool(self._kv.any())

    def holes(self, batch: Batch, rows: Ints, most: int = HOLE_TOKENS) -> Bools:
        """(D, N): more is missing than `most` tokens, and the drafter proposes junk over it."""
        return np.asarray((batch.missing[:, rows] > most) & self._kv[:, None])

    def closing(
        self, batch: Batch, rows: Ints, whole: Choice, now: Choice, token_s: Floats, rate: float, room: Room
    ) -> Ints:  # fmt: skip
        """(D, N): tokens, from the first missing one on, that draft models run over at the end of this step so that
        they can serve who has a hole. What does not fit into `room` is left for later steps.

        whole: the choice if nobody's cache had a hole; now: as things are. token_s: (D,), of a token in a first pass.
        """
        feed = np.zeros((len(token_s), len(rows)), np.int64)
        wanted = self.holes(batch, rows) & ((whole.asked[:, None] == np.arange(len(token_s))[:, None]).any(axis=0))
        wanted[[gate.closed(len(batch)) for gate in self.gates]] = False
        if not wanted.any():
            return feed
        gain = (whole.value - now.value) / wanted.sum()  # tokens a step, for each of the newcomers
        steps = expected_rest(batch.left[rows].astype(float), batch.emitted[rows].astype(float)) / 2
        costs = rate * token_s[:, None] * batch.missing[:, rows]
        pays = wanted & (gain * steps > costs)
        tokens = room.tokens
        for drafter, row in sorted(np.argwhere(pays).tolist(), key=lambda one: float(costs[one[0], one[1]])):
            missing = int(batch.missing[drafter, rows[row]])
            seconds = room.seconds / token_s[drafter] if token_s[drafter] > 0 else np.inf
            chunk = min(missing, tokens, int(min(seconds, 1e9)))
            if chunk >= min(missing, LEAST_CHUNK_TOKENS):
                feed[drafter, row] = chunk
                tokens -= chunk
                room = Room(tokens, room.seconds - chunk * token_s[drafter])
        return feed

    def feed(self, batch: Batch, passes: Ints, closing: Ints, reads: Bools, usable: Bools, *, always: bool) -> Ints:
        """(D, N): all that drafters run over. passes: (D,), who proposes; closing: (D, N), who has a hole closed, or a
        part of one; reads: (D,), who reads the prompts of this step though it may not propose; usable: (D,). always:
        whoever can be fed, is."""
        missing = np.ascontiguousarray(batch.missing)
        return _feed(missing, batch.prompt, passes, closing, reads, self._kv, self._hidden, usable, always)

    def reads(
        self, batch: Batch, acceptance: Acceptance, usable: Bools, token_s: Floats, rate: float, length: int
    ) -> Bools:
        """(D,): heads that read the prompts of this step, of which there are some. length: the draft length that their
        worth is judged at."""
        reads = np.zeros(len(token_s), dtype=bool)
        tokens, requests = batch.prompt.sum(), np.count_nonzero(batch.prompt)
        for drafter in [d for d, one in enumerate(self._drafters) if one.needs_hidden and usable[d]]:
            if self.gates[drafter].closed(len(batch) + batch.waiting):
                continue
            gain, trials = acceptance.worth_of_reading(drafter, max(1, length))
            if trials < LEAST_TRIALS:  # a head mostly proposes better over a prompt that it has read
                reads[drafter] = tokens > SHORT_TOKENS or bool(self._rng.random() >= LEARN_SHARE)
            else:
                reads[drafter] = gain * requests * HORIZON_TOKENS / 2 > rate * token_s[drafter] * tokens
        return reads


@compiled
def _feed(
    missing: Ints, prompt: Ints, passes: Ints, closing: Ints, reads: Bools, kv: Bools, hidden: Bools, usable: Bools,
    always: bool,
) -> Ints:  # fmt: skip
    feed = np.zeros(missing.shape, np.int64)
    for d in np.flatnonzero(usable):
        feed[d] = closing[d]
        for i in range(missing.shape[1]):
            if prompt[i] > 0:
                now = reads[d] or passes[d] > 0
            else:
                now = passes[d] > 0 and (hidden[d] or missing[d, i] <= HOLE_TOKENS)
            if (kv[d] or hidden[d]) and (now or always):
                feed[d, i] = missing[d, i]
    return feed
