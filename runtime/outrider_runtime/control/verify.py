"""Which waiting proposals the target scores in the next step, and which prompts and requests are held back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.estimate import node_paths, placeholder_paths
from outrider_runtime.control.acceptance.trials import Counts
from outrider_runtime.control.admission import ANY_NUMBER, Pace, Queue, admissions, token_budget
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import step_times
from outrider_runtime.control.cost.model import Shape, room, this_step, without_prompts
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import NO_CLASS, Batch, Bools, Columns, Floats, Ints, Waiting
from outrider_runtime.control.data.forest import Forest, Nodes
from outrider_runtime.control.data.plans import DeviceOrder, Purpose, VerifyPlan
from outrider_runtime.control.device_order import device_order
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.selection.nodes import select
from outrider_runtime.control.selection.offers import Terms, terms
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import UnderWay, anyone_late, behind, clocks, forced_nodes, longest_step_s, needed

NO_NODES: Bools = np.zeros(0, dtype=bool)
NO_PLACEHOLDERS: Bools = np.zeros(0, dtype=bool)
NOTHING, WHATEVER_FITS, WHAT_PAYS = range(3)
"""Which proposals are scored."""


class Verify:
    def __init__(self, evidence: Evidence, force: InForce, under_way: UnderWay, *, device_ranks: bool = False) -> None:
        """device_ranks: see `Settings`."""
        self._evidence, self.force, self._under_way = evidence, force, under_way
        self.device_ranks = device_ranks

    def plan(self, batch: Batch, forest: Forest) -> VerifyPlan:
        if not len(forest) and not self.force.has_classes:
            self._under_way.verifies_nothing()
            return VerifyPlan(NO_NODES, np.zeros(len(batch), np.int64), forest.purpose)
        evidence, force = self._evidence, self.force
        fresh_prompts = evidence.fresh_prompts.share if batch.waiting else 0.0  # only a waiting request can join
        limits = terms(
            batch, force, self._under_way.lambda_over_plain, self._under_way, force.most_tokens, fresh_prompts
        )
        queue = _queue(batch, admits=force.has_classes and force.hot.admission)
        scored = self._scored(forest)
        waiting = (
            forest.columns, forest.lengths, np.ascontiguousarray(forest.drafter_order), self._placeholders(forest),
            scored,
        )  # fmt: skip
        known = evidence.acceptance.columns, evidence.latency.columns
        made = _verify(batch.columns, waiting, known, limits, queue)
        purpose = Purpose.SLO if made.for_slo else forest.purpose
        tokens, admitted = (None if most == ANY_NUMBER else most for most in (made.token_budget, made.admit))
        device = self._device_order(batch, forest, scored, made.nodes, made.forced)
        return VerifyPlan(made.nodes, made.lengths, purpose, tokens, admitted, device)

    def _device_order(
        self, batch: Batch, forest: Forest, scored: int, nodes: Bools, forced: Ints
    ) -> DeviceOrder | None:  # fmt: skip
        """The order for the device; None if the host's lengths are final."""
        if not self.device_ranks or scored == NOTHING:
            return None
        most = room(this_step(Columns(*batch.columns)), batch.token_budget, batch.free_kv_tokens)
        counts, pays = self._evidence.acceptance.columns, scored == WHAT_PAYS
        return device_order(batch, forest, counts, nodes, forced, most, all_pay=not pays)

    def _placeholders(self, forest: Forest) -> Bools:
        """(N,): requests with placeholders, which cost a token whether they hold a proposal or not; empty for none."""
        return NO_PLACEHOLDERS if forest.placeholders is None or self.device_ranks else forest.placeholders

    def _scored(self, forest: Forest) -> int:
        if self.force.is_silent:
            return NOTHING
        return WHAT_PAYS if forest.purpose in (Purpose.CHOICE, Purpose.SLO) else WHATEVER_FITS


NO_ONE = Waiting(NO_CLASS, 0, 0)


class WaitingNodes(NamedTuple):
    """Proposals that wait for verification, and which of them may be scored."""

    nodes: tuple[Any, ...]
    """Fields of `Nodes`, in a plain tuple: compiled calls unpack it faster than a named one."""
    draft_lengths: Ints
    """(D,): `Forest.lengths`"""
    drafter_order: Ints
    """(R, N): `Forest.drafter_order`"""
    placeholders: Bools
    """(N,), or empty: see `Verify._placeholders`."""
    scored: int
    """NOTHING, WHATEVER_FITS or WHAT_PAYS."""


class Scored(NamedTuple):
    nodes: Bools
    lengths: Ints
    for_slo: bool
    """Some request is late: goodput alone might have chosen otherwise."""
    token_budget: int
    admit: int
    forced: Ints
    """(N,): see `DeviceOrder`. The other fields: see `VerifyPlan`."""


def _queue(batch: Batch, *, admits: bool) -> tuple[Any, ...]:
    """Fields of `Queue`."""
    return admits, batch.next is not None, batch.patience_used, *(batch.next or NO_ONE)


@compiled
def _lengths(request: Ints, nodes: Bools, requests: int) -> Ints:
    """(N,): scored nodes of each request."""
    lengths = np.zeros(requests, np.int64)
    for m in range(len(nodes)):
        lengths[request[m]] += nodes[m]
    return lengths


@compiled
def _gained(paths: Floats, request: Ints, nodes: Bools, requests: int) -> Floats:
    """(N,): tokens that each request is expected to get beyond its bonus token."""
    gained = np.zeros(requests)
    for m in range(len(paths)):
        gained[request[m]] += paths[m] if nodes[m] else 0.0
    return gained


@compiled
def _verify(
    columns: tuple[Any, ...], waiting: tuple[Any, ...], known: tuple[tuple[Any, ...], tuple[Any, ...]],
    terms: tuple[Any, ...], queue: tuple[Any, ...],
) -> Scored:  # fmt: skip
    """Choose the nodes to score and the requests to admit, and set the tokens that requests are expected to get.

    columns, waiting, terms, queue: fields of `Columns`, `WaitingNodes`, `Terms`, `Queue`. known: those of `Counts` and
    `Costs`.
    """
    batch, forest, limits, waits = Columns(*columns), WaitingNodes(*waiting), Terms(*terms), Queue(*queue)
    proposed, counts, costs = Nodes(*forest.nodes), Counts(*known[0]), Costs(*known[1])
    base, requests, for_slo, request = this_step(batch), len(batch.slot), False, proposed.request
    nodes, forced = np.zeros(len(request), np.bool_), np.zeros(len(request), np.bool_)
    paths: Floats = np.zeros(0)
    if forest.scored == WHAT_PAYS and len(request):
        paths = node_paths(counts, batch, proposed)
        if forest.placeholders.any():
            placeholder_paths(
                counts, batch, proposed, forest.drafter_order, forest.draft_lengths, forest.placeholders, paths
            )
        nodes, for_slo, forced = _best(batch, proposed, forest.draft_lengths, paths, costs, base, limits)
    elif forest.scored == WHATEVER_FITS:
        nodes = _whatever_fits(proposed, batch.left, room(base, limits.token_budget, limits.free_kv_tokens))
    lengths, gained = _lengths(request, nodes, requests), _gained(paths, request, nodes, requests)
    limits.expected[batch.slot] = gained
    budget = admit = ANY_NUMBER
    if waits.admits and (waits.has_waiting or base.n_prompt > 0.0):
        alone, rows = without_prompts(base), np.flatnonzero(batch.prompt + batch.prompt_left == 0)
        read_s = 0.0
        if limits.drafts_s > 0.0:
            read_s = step_times.draft_columns(costs, batch.context[rows], 0.0, 1)[2].sum()
        state, proposals = clocks(batch, rows, limits.tpots_s), float(lengths.sum())
        pace = Pace(state, alone, proposals, 1.0 + gained[rows], limits.drafts_s, read_s)
        budget = token_budget(limits.token_budget, waits, pace, costs)
        admit = admissions(batch, waits, pace, costs, limits.tpots_s)
    return Scored(nodes, lengths, for_slo, budget, admit, _lengths(request, forced, requests))


@compiled
def _whatever_fits(proposed: Nodes, left: Ints, room: int) -> Bools:
    """(M,): as many nodes as fit, from the first request on, whatever they do to goodput. left: (N,), see `Batch`."""
    nodes, count = np.zeros(len(proposed.request), np.bool_), 0
    for m in range(len(nodes)):
        if proposed.depth[m] < left[proposed.request[m]]:
            count += 1
            nodes[m] = count <= room
    return nodes


@compiled
def _best(
    batch: Columns, proposed: Nodes, draft_lengths: Ints, paths: Floats, costs: Costs, base: Shape, limits: Terms
) -> tuple[Bools, bool, Bools]:
    """(M,) nodes to score, whether some are scored for late requests, and (M,) those that are."""
    request, depth, requests = proposed.request, proposed.depth, len(batch.slot)
    budget = room(base, limits.token_budget, limits.free_kv_tokens)
    alone, most, nothing = without_prompts(base), min(budget, len(paths)), np.zeros(len(paths), np.bool_)
    read_s = step_times.read_s(costs, draft_lengths, alone.n_requests)
    node_s = step_times.node_s(costs, batch.context, read_s)
    price = step_times.price(costs, base, node_s, limits.lambda_over_plain, most, limits.fresh_prompts, True)
    nodes = select(paths, request, depth, price, budget, nothing, np.inf).nodes
    if base.n_prompt > 0.0:
        price = step_times.price(costs, alone, node_s, limits.lambda_over_plain, most, limits.fresh_prompts, True)
    step_s = price.varlen_s[min(nodes.sum(), most)] + limits.drafts_s
    if not anyone_late(batch, limits.tpots_s, step_s):
        return nodes, False, nothing
    state = clocks(batch, np.arange(requests), limits.tpots_s)
    late = behind(state, step_s, 1.0 + _gained(paths, request, ~nothing, requests))
    if not late.any():
        return nodes, False, nothing
    forced = forced_nodes(paths, request, late, needed(state, step_s), step_s, price, budget)
    gained = 1.0 + _gained(paths, request, forced, requests)
    longest_s = (
        longest_step_s(state, gained, price.varlen_s[min(forced.sum(), most)] + limits.drafts_s) - limits.drafts_s
    )
    return select(paths, request, depth, price, budget, forced, longest_s).nodes, True, forced
