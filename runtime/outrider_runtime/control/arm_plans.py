"""Plans of a draft canary: two pools in one engine, each planned as if the batch were its own, and merged.

Otherwise the loop, which pays a drafter's fixed costs once for a whole batch, would run only the better drafter. Each
arm has its own choice, explorations and lambda. Acceptance rates, costs and probes (k = 0 for every request) are
shared. N requests, D drafters, M nodes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.arm_prices import BatchMix, Credits, step_credits
from outrider_runtime.control.batch import CANDIDATE, NO_ARM, NO_CLASS, NO_DRAFTER, STABLE, Batch, Bools, Columns, Ints
from outrider_runtime.control.evidence import TRIALS, Evidence
from outrider_runtime.control.plans import ROOT, ArmPlan, DeviceOrder, DraftPlan, Forest, Outcome, Purpose, VerifyPlan
from outrider_runtime.control.propose import Propose
from outrider_runtime.control.settings import InForce, Pin, Settings, in_force
from outrider_runtime.control.slo import UnderWay
from outrider_runtime.control.step_times import room, this_step
from outrider_runtime.control.trials import TrialSchedule
from outrider_runtime.control.value import Goodput
from outrider_runtime.control.verify import Verify

ARMS = (STABLE, CANDIDATE)
RANKS = 2
_PURPOSES = (Purpose.EXPLORE, Purpose.SLO, Purpose.CHOICE, Purpose.PROBE, Purpose.FIXED)
"""The purpose of a merged plan is the first of these that one of its two plans has."""


def can_compare(settings: Settings, force: InForce) -> bool:
    """Whether each arm of the canary is served as if its pool were alone: speculation is on, and every drafter of both
    pools is loaded, neither paused nor suspended, and fed what it needs. False without a canary."""
    if settings.hot.arms is None or force.is_silent or force.pinned is not None:
        return False
    usable = {settings.drafters[number].name for number in np.flatnonzero(force.usable).tolist()}
    return frozenset.union(*settings.hot.arms) <= usable


class SharedProbes:
    """The probes that both arms share: one decision per step."""

    def __init__(self, trials: TrialSchedule) -> None:
        self._trials, self.is_probe = trials, False
        self._speculating = self._for_slo = False

    @property
    def off(self) -> bool:
        return self._trials.off

    def begin(self, requests: int) -> None:
        """Decide whether the next step is a probe. Whether the arms speculate is known from their last choices."""
        self.is_probe = self._trials.probes(requests, speculating=self._speculating, for_slo=self._for_slo)
        self._speculating = self._for_slo = False

    def note(self, *, speculating: bool, for_slo: bool) -> None:
        """Note an arm's choice, for the next decision."""
        self._speculating |= speculating
        self._for_slo |= for_slo


class ArmTrials(TrialSchedule):
    """One arm's trials: its own explorations, and the probes that both arms share."""

    def __init__(self, shared: SharedProbes, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._shared = shared

    @property
    def off(self) -> bool:
        return self._shared.off

    def probes(self, requests: int, *, speculating: bool, for_slo: bool) -> bool:  # noqa: ARG002
        self._shared.note(speculating=speculating, for_slo=for_slo)
        return self._shared.is_probe


class ArmPlanning:
    """Plans one arm."""

    def __init__(self, number: int, settings: Settings, evidence: Evidence, probes: SharedProbes, expected: UnderWay,
                 rng: np.random.Generator) -> None:  # fmt: skip
        """expected: holds the tokens that requests are expected to get, which both arms share."""
        self.number = number
        self.evidence = copy.copy(evidence)
        self.evidence.goodput, self.evidence.trials = Goodput(), ArmTrials(probes, rng)
        force, self.under_way = in_force(settings, (), None), UnderWay(expected.expected)
        self.verify = Verify(self.evidence, force, self.under_way, device_ranks=settings.device_ranks)
        self.propose = Propose(settings, self.evidence, force, self.under_way)
        self.planned: ArmPlan | None = None
        """The last draft plan; its proposals are verified next."""
        self.tokens_left_over = 0.0
        """Fraction of a token that the last order to the device left out."""

    def settle(self, settings: Settings, suspended: Mapping[int, str], pinned: Pin | None) -> None:
        names = settings.hot.arms[self.number] if settings.hot.arms is not None else frozenset()
        outside = {d for d, drafter in enumerate(settings.drafters) if drafter.name not in names}
        self.verify.force = in_force(settings, outside | set(suspended), pinned)
        self.propose.settle(self.verify.force)

    def look_at(self, evidence: Evidence) -> None:
        """Take over those parts of the shared evidence that may have been replaced since the last step."""
        self.evidence.latency, self.evidence.longest = evidence.latency, evidence.longest


class ArmPlanner:
    """Plans both arms, and merges their plans."""

    def __init__(self, settings: Settings, evidence: Evidence, under_way: UnderWay, rng: np.random.Generator) -> None:
        self._evidence, self._drafters, self._under_way = evidence, len(settings.drafters), under_way
        self._probes, self._mix = SharedProbes(evidence.trials), BatchMix()
        self._arms = tuple(ArmPlanning(number, settings, evidence, self._probes, under_way, rng) for number in ARMS)

    def settle(self, settings: Settings, suspended: Mapping[int, str], pinned: Pin | None) -> None:
        """Put settings in force from the next decision on."""
        for arm in self._arms:
            arm.settle(settings, suspended, pinned)

    @property
    def has_disabled_drafts(self) -> bool:
        """Some arm does not feed one of its drafters, since it has not chosen it for a while."""
        return any(arm.propose.has_disabled_drafts for arm in self._arms)

    # -- draft --------------------------------------------------------------------------------------------------

    def plan_draft(self, batch: Batch) -> DraftPlan:
        self._probes.begin(len(batch))
        plans = list[tuple[ArmPlanning, Bools, DraftPlan]]()
        for arm, own in self._present(batch):
            plans.append((arm, own, arm.propose.plan(to_draft_for(batch, own))))
        # A step in which nothing was proposed is planned for both arms at once: for the slower drafts of the two.
        self._under_way.drafts_s = max(arm.under_way.drafts_s for arm, _, _ in plans) if plans else 0.0
        return self._together(batch, plans)

    def _present(self, batch: Batch) -> Iterable[tuple[ArmPlanning, Bools]]:
        """Arms that have requests in the batch, each with those requests (N,)."""
        for arm in self._arms:
            arm.look_at(self._evidence)
            own = own_requests(batch, arm.number)
            if own.any():
                yield arm, own

    def _together(self, batch: Batch, plans: Sequence[tuple[ArmPlanning, Bools, DraftPlan]]) -> DraftPlan:
        passes, widths = np.zeros(self._drafters, np.int64), np.ones(self._drafters, np.int64)
        order, feed = np.full((RANKS, len(batch)), NO_DRAFTER), np.zeros(batch.missing.shape, np.int64)
        for arm, own, plan in plans:
            order[: len(plan.drafter_order), own] = plan.drafter_order[:, own]
            feed[:, own] = plan.feed[:, own]
            runs = (order[:, own] == np.arange(self._drafters)[:, None, None]).any(axis=(1, 2))
            arm.planned = ArmPlan(arm.number, np.where(runs, plan.passes, 0), plan.purpose)
            passes = np.maximum(passes, arm.planned.passes)
            widths = np.maximum(widths, plan.widths)
        made = tuple(arm.planned for arm, _, _ in plans if arm.planned is not None)
        return DraftPlan(passes, widths, order, feed, _purpose([planned.purpose for planned in made]), made)

    # -- verify -------------------------------------------------------------------------------------------------

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan | None:
        """The merged plan; None if there is nothing to decide by arm: no request decodes, or nothing was proposed."""
        made = list[tuple[ArmPlanning, Bools, VerifyPlan]]()
        nodes = np.zeros(len(forest), bool)
        for arm, own in self._present(batch):
            if not len(forest) or not (own & batch.decodes).any():
                continue
            planned = arm.planned
            seen = to_verify(batch, forest, own, None if planned is None else planned.passes)
            seen.forest.purpose = forest.purpose if planned is None else planned.purpose
            plan = arm.verify.plan(seen.batch, seen.forest)
            nodes[seen.number[seen.is_real & plan.nodes]] = True
            made.append((arm, own, plan))
        return self._verified(batch, forest, nodes, made) if made else None

    def _verified(
        self, batch: Batch, forest: Forest, nodes: Bools, made: Sequence[tuple[ArmPlanning, Bools, VerifyPlan]]
    ) -> VerifyPlan:
        most = room(this_step(Columns(*batch.columns)), batch.token_budget, batch.free_kv_tokens)
        nodes &= np.cumsum(nodes) <= most  # each arm was planned as if the whole room were its own
        lengths = np.bincount(forest.request[nodes], minlength=len(batch))
        for_slo = any(plan.purpose is Purpose.SLO for _, _, plan in made)
        return VerifyPlan(
            nodes, lengths, Purpose.SLO if for_slo else forest.purpose,
            _least(plan.token_budget for _, _, plan in made), _least(plan.admit for _, _, plan in made),
            _device_order(batch, lengths, most, made),
        )  # fmt: skip

    # -- observe ------------------------------------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> Credits | None:
        """Learn from a finished step; call it after the shared evidence has learned. None for a step without arms."""
        plan = outcome.draft_plan
        if outcome.batch.arm is None or not plan.arms:
            return None
        probed = Purpose.PROBE in (plan.purpose, outcome.verify_purpose) or self._probes.off
        made = step_credits(outcome, self._evidence.latency.costs, is_counted=not probed)
        for planned in plan.arms:
            self._learn(self._arms[planned.arm], planned, outcome, made)
        return self._mix.balanced(made, outcome.batch.arm)

    def _learn(self, arm: ArmPlanning, planned: ArmPlan, outcome: Outcome, made: Credits) -> None:
        """Learn the arm's own lambda, and charge the cost of its explorations."""
        batch = outcome.batch
        assert batch.arm is not None
        own, evidence = (batch.arm == arm.number) & batch.decodes, arm.evidence
        evidence.trials.earn()
        seconds, requests = float(made.price_s[own].sum()), int(batch.decodes.sum())
        if not seconds > 0.0 or not made.plain_token_s > 0.0:
            return
        whole, plain_rate = requests / float(own.sum()), 1.0 / made.plain_token_s
        tokens, seconds = whole * float(made.tokens[own].sum()), whole * seconds
        if planned.purpose in TRIALS:
            evidence.trials.pay(seconds, tokens / (plain_rate * max(1.0, evidence.goodput.ratio)))
        if Purpose.EXPLORE not in (planned.purpose, outcome.verify_purpose):  # see `Evidence`
            evidence.goodput.observe(tokens, seconds, plain_rate, prefill=bool(batch.prompt.any()))


def _purpose(purposes: Sequence[Purpose]) -> Purpose:
    return next(purpose for purpose in _PURPOSES if purpose in purposes)


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _device_order(
    batch: Batch, lengths: Ints, most: int, made: Sequence[tuple[ArmPlanning, Bools, VerifyPlan]]
) -> DeviceOrder | None:
    """The merged order: each arm's for its own requests. None if the host's lengths are final."""
    caps, forced, weights = np.zeros(len(batch), np.int64), np.zeros(len(batch), np.int64), np.ones(len(batch))
    tokens, device_ranks = [0] * len(ARMS), False
    for arm, own, plan in made:
        if plan.device is None:
            continue
        device_ranks, mine = True, own & batch.decodes
        for column, of_arm in ((caps, plan.device.caps), (forced, plan.device.forced), (weights, plan.device.weights)):
            column[mine] = of_arm[mine]
        tokens[arm.number] = _own_tokens(arm, plan.device, mine, float(batch.decodes.sum()))
    if not device_ranks:
        return None
    if caps.sum() > most:
        caps = lengths
        tokens = [min(tokens[arm], int(caps[own_requests(batch, arm)].sum())) for arm in ARMS]
        forced = np.minimum(forced, caps)
    return DeviceOrder(sum(tokens), caps, forced, weights, batch.arm, tuple(tokens))


def _own_tokens(arm: ArmPlanning, device: DeviceOrder, mine: Bools, decoding: float) -> int:
    """Tokens to verify for the arm's own requests `mine` (N,): their share of the order, which was made as if all
    `decoding` requests were the arm's. A fraction of a token is left for the next step; if it was rounded away, an arm
    of few requests would get none.
    """
    most, least = int(device.caps[mine].sum()), int(device.forced[mine].sum())
    if device.tokens == device.caps.sum():
        return most
    share = device.tokens * float(mine.sum()) / decoding + arm.tokens_left_over
    whole = min(max(int(share), least), most)
    arm.tokens_left_over = min(max(share - whole, 0.0), 1.0)
    return whole


def own_requests(batch: Batch, arm: int) -> Bools:
    """(N,): requests that are planned with the arm. Those from before the canary belong to the stable arm."""
    assert batch.arm is not None
    return np.asarray((batch.arm == arm) | ((batch.arm == NO_ARM) & (arm == STABLE)))


def to_draft_for(batch: Batch, own: Bools) -> Batch:
    """The batch that an arm chooses drafters for. Requests of the other arm stand for further ones of its own: without
    KV gaps in the arm's drafters, and without an SLO class. own: (N,), the arm's requests."""
    read = np.minimum(batch.missing, np.maximum(1, batch.prompt))
    return dataclasses.replace(
        batch,
        missing=np.where(own, batch.missing, read),
        slo_class=np.where(own, batch.slo_class, NO_CLASS),
        arm=None,
    )


class OwnForest(NamedTuple):
    """A batch and its proposals, in which copies of the arm's requests replace decoding requests of the other arm."""

    batch: Batch
    forest: Forest
    number: Ints
    """(M',): each node's number in the original forest."""
    is_real: Bools
    """(M',): nodes of the arm's requests themselves, not of copies."""


def to_verify(batch: Batch, forest: Forest, own: Bools, passes: Ints | None) -> OwnForest:
    """The batch and proposals that an arm chooses nodes to verify for. own: (N,), the arm's requests; some of them
    decode. passes: (D,), the arm's own draft lengths, since the other arm may have ordered more of a drafter; None: all
    proposals."""
    source, usable = _sources(batch, own), own[forest.request]
    if passes is not None:
        usable &= forest.depth <= passes[forest.drafter]
    number, request, parent = _copied_nodes(forest, np.flatnonzero(usable), source)
    columns = {
        name: getattr(batch, name)[source] for name in ("slot", "slo_class", "context", "left", "emitted", "elapsed_s")
    }
    placeholders = None if forest.placeholders is None else forest.placeholders[source]
    copied = dataclasses.replace(
        forest, request=request, parent=parent, drafter=forest.drafter[number], depth=forest.depth[number],
        rank=forest.rank[number], confidence=forest.confidence[number], drafter_order=forest.drafter_order[:, source],
        lengths=forest.lengths if passes is None else np.minimum(forest.lengths, passes), placeholders=placeholders,
    )  # fmt: skip
    is_real = source[request] == request
    return OwnForest(dataclasses.replace(batch, **columns, arm=None), copied, number, is_real)


def _sources(batch: Batch, own: Bools) -> Ints:
    """(N,): the request that each row is a copy of: itself, or for a decoding request of the other arm one of the
    arm's, in turn."""
    source, decodes = np.arange(len(batch)), batch.decodes
    others = np.flatnonzero(~own & decodes)
    source[others] = np.resize(np.flatnonzero(own & decodes), len(others))
    return source


def _copied_nodes(forest: Forest, usable: Ints, source: Ints) -> tuple[Ints, Ints, Ints]:
    """(M',) each: a copied node's number in the original forest, its request, its parent. usable: numbers of the nodes
    to copy, each with its parent."""
    kept = usable[np.argsort(forest.request[usable], kind="stable")]
    counts = np.bincount(forest.request[kept], minlength=len(source))
    first = np.cumsum(counts) - counts
    place = np.zeros(len(forest), np.int64)  # within its request
    place[kept] = np.arange(len(kept)) - first[forest.request[kept]]
    lengths = counts[source]
    begins = np.cumsum(lengths) - lengths
    request = np.repeat(np.arange(len(source)), lengths)
    number = kept[first[source][request] + np.arange(len(request)) - begins[request]]
    parent = forest.parent[number]
    return number, request, np.where(parent == ROOT, ROOT, begins[request] + place[parent])
