"""What the target scores of the proposals that wait, and which prompts and requests are held back for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_runtime.control.admission import ANY_NUMBER, Pace, Queue, admissions, token_budget
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import step_times
from outrider_runtime.control.cost.model import Shape, this_step, without_prompts
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import NOBODY, Batch, Bools, Columns, Floats, Ints, Waiting
from outrider_runtime.control.data.forest import Forest, Nodes
from outrider_runtime.control.data.plans import Purpose, VerifyPlan
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.selection.nodes import best_nodes, everything
from outrider_runtime.control.selection.offers import Terms, terms
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import UnderWay, anyone_late, behind, clocks, forced_nodes, longest_step_s, needed

NO_NODES: Bools = np.zeros(0, dtype=bool)
NO_PATHS: Floats = np.zeros(0)


class Verify:
    def __init__(self, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self._evidence, self.force, self._under_way = evidence, force, under_way

    def plan(self, batch: Batch, forest: Forest) -> VerifyPlan:
        chosen, nodes, paths = forest.purpose in (Purpose.CHOICE, Purpose.SLO), NO_NODES, NO_PATHS
        if not len(forest) or self.force.silent:
            nodes, chosen = np.zeros(len(forest), dtype=bool), False
        elif chosen:
            paths = self._evidence.acceptance.node_paths(batch, forest)
        else:
            room = _room_of(batch.columns, batch.token_budget, batch.free_kv_tokens)
            nodes = everything(forest, batch.left, room)
        if not chosen and not self.force.has_classes:
            return VerifyPlan(nodes, _lengths(forest.request, nodes, len(batch)), forest.purpose)
        return self._plan(batch, forest, nodes, paths)

    def _plan(self, batch: Batch, forest: Forest, nodes: Bools, paths: Floats) -> VerifyPlan:
        """nodes: what is scored whatever it is worth; without any, what `paths` say."""
        evidence, under_way = self._evidence, self._under_way
        now = terms(batch, self.force, evidence.goodput.ratio, under_way, self.force.most_tokens)
        queue = _queue(batch, admits=self.force.has_classes and self.force.hot.admission)
        nodes, lengths, for_slo, budget, admit = _verify(
            batch.columns, forest.columns, forest.lengths, nodes, paths, evidence.latency.columns, now, queue
        )
        purpose = Purpose.SLO if for_slo else forest.purpose
        return VerifyPlan(nodes, lengths, purpose, *(None if most == ANY_NUMBER else most for most in (budget, admit)))


NO_ONE = Waiting(NOBODY, 0, 0)


def _queue(batch: Batch, *, admits: bool) -> tuple[bool, bool, float, int, int, int, bool]:
    """As `Queue`."""
    return admits, batch.next is not None, batch.patience_used, *(batch.next or NO_ONE)


@compiled
def _room_of(columns: tuple[Any, ...], token_budget: int, free_kv_tokens: int) -> int:
    return _room(this_step(Columns(*columns)), token_budget, free_kv_tokens)


@compiled
def _room(base: Shape, token_budget: int, free_kv_tokens: int) -> int:
    """Most proposals that a step of `base` may hold."""
    decoding = int(base.n_batched - base.n_prompt)
    return max(0, min(token_budget - decoding, free_kv_tokens - int(base.n_batched)))


@compiled
def _lengths(request: Ints, nodes: Bools, requests: int) -> Ints:
    """(N,): the nodes of each request that are scored."""
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
    columns: tuple[Any, ...], forest: tuple[Any, ...], asked: Ints, nodes: Bools, paths: Floats, costs: tuple[Any, ...],
    terms: tuple[Any, ...], queue: tuple[Any, ...],
) -> tuple[Bools, Ints, bool, int, int]:  # fmt: skip
    """The fields of `VerifyPlan`; whether goodput alone might have chosen otherwise in place of its purpose.

    columns, forest, costs, terms, queue: as `Columns`, `Nodes`, `Costs`, `Terms`, `Queue`; what requests are expected
    to get is set. asked: `Forest.lengths`. paths: (M,), or (0,) where `nodes` are scored whatever they are worth.
    """
    batch, proposed, known, now, waits = Columns(*columns), Nodes(*forest), Costs(*costs), Terms(*terms), Queue(*queue)
    base, requests, for_slo, request = this_step(batch), len(batch.slot), False, proposed.request
    if len(paths):
        nodes, for_slo = _best(batch, proposed, asked, paths, known, base, now)
    scored, gained = _lengths(request, nodes, requests), _gained(paths, request, nodes, requests)
    now.expected[batch.slot] = gained
    budget = admit = ANY_NUMBER
    if waits.admits and (waits.someone or base.n_prompt > 0.0):
        alone, rows = without_prompts(base), np.flatnonzero(batch.prompt + batch.prompt_left == 0)
        read_s = step_times.draft_columns(known, batch.context[rows], 0.0, 1)[2].sum() if now.drafts_s > 0.0 else 0.0
        state, proposals = clocks(batch, rows, now.tpots_s), float(scored.sum())
        on = Pace(state, alone, proposals, 1.0 + gained[rows], now.drafts_s, read_s)
        budget = token_budget(now.token_budget, waits, on, known)
        admit = admissions(batch, waits, on, known, now.tpots_s)
    return nodes, scored, for_slo, budget, admit


@compiled
def _best(
    batch: Columns, proposed: Nodes, asked: Ints, paths: Floats, costs: Costs, base: Shape, now: Terms
) -> tuple[Bools, bool]:
    """What is scored, and whether for those behind their TPOT."""
    request, depth, requests = proposed.request, proposed.depth, len(batch.slot)
    budget = _room(base, now.token_budget, now.free_kv_tokens)
    alone, most, nothing = without_prompts(base), min(budget, len(paths)), np.zeros(len(paths), np.bool_)
    read_s = step_times.read_s(costs, asked, alone.n_requests)
    price = step_times.price(costs, base, batch.context, read_s, now.goodput, most)
    nodes, _ = best_nodes(paths, request, depth, price, budget, nothing, np.inf)
    if base.n_prompt > 0.0:
        price = step_times.price(costs, alone, batch.context, read_s, now.goodput, most)
    step_s = price.ragged_s[min(nodes.sum(), most)] + now.drafts_s
    if not anyone_late(batch, now.tpots_s, step_s):
        return nodes, False
    state = clocks(batch, np.arange(requests), now.tpots_s)
    who = behind(state, step_s, 1.0 + _gained(paths, request, ~nothing, requests))
    if not who.any():
        return nodes, False
    forced = forced_nodes(paths, request, who, needed(state, step_s), step_s, price, budget)
    gained = 1.0 + _gained(paths, request, forced, requests)
    longest_s = longest_step_s(state, gained, price.ragged_s[min(forced.sum(), most)] + now.drafts_s) - now.drafts_s
    return best_nodes(paths, request, depth, price, budget, forced, longest_s)[0], True
