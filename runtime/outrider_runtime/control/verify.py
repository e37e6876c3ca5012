"""What the target scores of the proposals that wait, and which prompts and requests are held back for them."""

from __future__ import annotations

import dataclasses

import numpy as np

from outrider_runtime.control.admission import Pace, admissions, token_budget
from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import Shape, this_step, without_prompts
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.forest import Forest
from outrider_runtime.control.plans import Purpose, VerifyPlan
from outrider_runtime.control.select import everything, select
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import UnderWay, anyone_late, clocks, forced_nodes


class Verify:
    def __init__(self, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self._evidence, self.force, self._under_way = evidence, force, under_way

    def plan(self, batch: Batch, forest: Forest) -> VerifyPlan:
        proposals = len(forest) > 0 and not self.force.silent
        admits = self.force.has_classes and self.force.hot.admission
        base = this_step(batch)
        admits = admits and (batch.next is not None or base.n_prompt > 0)
        if not proposals and not admits:
            return VerifyPlan(np.zeros(len(forest), dtype=bool), np.zeros(len(batch), np.int64), forest.purpose)
        decoding = round(base.n_batched - base.n_prompt)
        budget = max(0, min(batch.token_budget - decoding, batch.free_kv_tokens - round(base.n_batched)))
        nodes: Bools = np.zeros(len(forest), dtype=bool)
        paths: Floats = np.zeros(len(forest))
        purpose = forest.purpose
        if proposals and purpose not in (Purpose.CHOICE, Purpose.SLO):
            nodes = everything(forest, batch.left, budget)
        elif proposals:
            paths = self._evidence.acceptance.node_paths(batch, forest)
            nodes, purpose = self._select(batch, forest, paths, base, budget)
        lengths, gained = _of_requests(forest.request, nodes, paths, len(batch))
        plan = VerifyPlan(nodes, lengths, purpose)
        if not self.force.has_classes:
            return plan
        self._under_way.expected[batch.slot] = gained
        return self._hold_back(plan, batch, base, gained) if admits else plan

    def _select(
        self, batch: Batch, forest: Forest, paths: Floats, base: Shape, budget: int
    ) -> tuple[Bools, Purpose]:  # fmt: skip
        alone, most = without_prompts(base), min(budget, len(forest))
        reads_s = self._evidence.latency.read_s(forest.lengths, alone.n_requests)
        price = self._evidence.price(base, batch.context, reads_s, most)
        request, depth = forest.request, forest.depth
        best = select(paths, request, depth, price, budget)
        if not self.force.has_classes:
            return best.nodes, forest.purpose
        price = self._evidence.price(alone, batch.context, reads_s, most) if base.n_prompt else price
        drafts_s = self._under_way.drafts_s
        step_s = price.step_s(int(best.nodes.sum())) + drafts_s
        if not anyone_late(batch.slo_class, batch.elapsed_s, batch.emitted, self.force.tpots_s, step_s):
            return best.nodes, forest.purpose
        state = clocks(batch, np.arange(len(batch)), self.force.tpots_s)
        who = state.behind(step_s, 1.0 + np.bincount(request, weights=paths, minlength=len(batch)))
        if not who.any():
            return best.nodes, forest.purpose
        forced = forced_nodes(paths, request, who, state.needed(step_s), step_s, price, budget)
        gained = 1.0 + np.bincount(request, weights=paths * forced, minlength=len(batch))
        longest_s = state.longest_step_s(gained, price.step_s(int(forced.sum())) + drafts_s) - drafts_s
        paced = select(paths, request, depth, price, budget, forced=forced, longest_s=longest_s)
        return paced.nodes, Purpose.SLO

    def _hold_back(self, plan: VerifyPlan, batch: Batch, base: Shape, gained: Floats) -> VerifyPlan:
        """The plan with as many prompts and new requests as the running classes bear."""
        rows, alone = np.flatnonzero(batch.decodes), without_prompts(base)
        state = clocks(batch, rows, self.force.tpots_s)
        pace = Pace(state, alone, int(plan.lengths.sum()), 1.0 + gained[rows], self._under_way.drafts_s)
        latency, reads_s = self._evidence.latency, 0.0
        if pace.drafts_s:
            reads_s = float(latency.draft_columns(batch.context[rows])[2].sum())
        return dataclasses.replace(
            plan, token_budget=token_budget(batch, pace, latency, reads_s),
            admit=admissions(batch, pace, latency, self.force.tpots_s),
        )  # fmt: skip


@compiled
def _of_requests(request: Ints, nodes: Bools, paths: Floats, requests: int) -> tuple[Ints, Floats]:
    """Two (N,): the nodes of each request that are scored, and the tokens that they are expected to give."""
    lengths, gained = np.zeros(requests, np.int64), np.zeros(requests)
    for m in np.flatnonzero(nodes):
        lengths[request[m]] += 1
        gained[request[m]] += paths[m]
    return lengths, gained
