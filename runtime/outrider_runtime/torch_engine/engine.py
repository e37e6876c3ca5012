"""The engine: requests come in, and at every step some of their tokens go out.

    plan_verify -> schedule -> run -> plan_draft -> propose -> observe

Decisions are the loop's, which every engine shares; one thread calls all of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import torch

from outrider_runtime.control.data.batch import Ints, Waiting
from outrider_runtime.control.data.forest import ROOT, Nodes
from outrider_runtime.control.data.plans import VerifyPlan
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.orders import Order
from outrider_runtime.loop.requests import Delivery, End
from outrider_runtime.loop.slo import SLO_CLASS_ARGUMENT
from outrider_runtime.loop.stepper import Room, Stepper, View
from outrider_runtime.loop.steps import Verdicts
from outrider_runtime.loop.waiting import patience_used
from outrider_runtime.step_clock import HostClock, StepClock
from outrider_runtime.torch_engine.commit import Committed, Finish, Judged, Path, commit, verdicts, walk
from outrider_runtime.torch_engine.decoder import Hidden
from outrider_runtime.torch_engine.drafting import Drafter, Finished, Ran, Report, draft
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.rejection import Chain, judge
from outrider_runtime.torch_engine.requests import Request
from outrider_runtime.torch_engine.runner import Model, Segment
from outrider_runtime.torch_engine.sampling import Row, TokenLogprobs, draw, logprobs_of, row_of, weights_of
from outrider_runtime.torch_engine.scheduler import TARGET, Limits, Scheduled, Scheduler
from outrider_runtime.torch_engine.tree import Tree, ancestors, nodes_of

NO_PREFIX_CACHE_BLOCK = 1 << 40
"""Longer than any request: the loop's books of shared blocks stay empty."""


class Output(NamedTuple):
    """What a step gives one request's user."""

    request: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    """Of each token; empty where none were asked for."""
    finish: Finish | None
    stop_reason: int | str | None


class Drawn(NamedTuple):
    """Of one request: its rows of logits, and what was drawn from them."""

    logits: torch.Tensor
    """(1 + chosen proposals, vocabulary)"""
    tokens: dict[int, int]
    """ROOT, then the chosen nodes -> the token behind each; in the order of the rows."""


@dataclass(slots=True, eq=False)
class Models:
    target: Model
    drafters: Sequence[Drafter]
    """In the order of the loop's; one with KV is the pool's model of its place + 1."""
    between: tuple[int, ...] = ()
    """Layers of the target whose input heads read."""


class Engine:
    def __init__(
        self, models: Models, pool: KVPool, loop: ControlLoop, limits: Limits, longest: int,
        clock: Callable[[], float] = time.monotonic, step_clock: StepClock | None = None,
    ) -> None:  # fmt: skip
        """longest: tokens that a request may have, its prompt's included."""
        self.longest = longest
        self.scheduler = Scheduler(pool, limits)
        self._models, self._pool, self._loop = models, pool, loop
        self._clock, self._step_clock = clock, step_clock or HostClock()
        self._stepper = Stepper(
            loop, block_size=NO_PREFIX_CACHE_BLOCK, block_ids=lambda _name, _first, _last: [],
            drafting_is_told=True, now=clock(),
        )  # fmt: skip
        self._requests = self._stepper.requests
        self._there: dict[str, Request] = {}
        self._now = clock()
        self._set_idle(np.zeros(len(models.drafters), bool))
        pool.on_drop = self._on_drop
        self.scheduler.on_preempt = self._on_preempt

    # -- requests come and go -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._there)

    @property
    def free_kv_bytes(self) -> int:
        return self._pool.free_bytes

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that target and drafters could all cache."""
        return self._pool.free_tokens_of_all

    def add(self, request: Request, arrived_at: float, slo_class: str | None = None) -> None:
        """arrived_at: Unix seconds. slo_class: that the request names."""
        limit = min(request.prompt + request.stops.max_tokens, self.longest)
        named: dict[str, object] | None = None if slo_class is None else {SLO_CLASS_ARGUMENT: slo_class}
        self._requests.arrived(request.name, arrived_at, named, prompt=request.prompt, limit=limit)
        of = self._requests.slo_class(request.name)
        request.due_at = self._requests.arrived_at(request.name) + self._loop.patience_s(of)
        request.looseness = self._loop.tpot_s(of)
        self._there[request.name] = request
        self.scheduler.add(request)

    def abort(self, name: str) -> None:
        """Its client has left; nothing happens where it has ended."""
        request = self._there.get(name)
        if request is not None:
            self._requests.aborted(name, self._clock(), has_stop_strings=False)
            self._leave(request)

    def _leave(self, request: Request) -> None:
        del self._there[request.name]
        self.scheduler.finish(request)
        self._forget(request)

    def _on_preempt(self, request: Request) -> None:
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Nothing is cached of it any more."""
        self._models.target.cache.forget(request.name)
        for drafter in self._models.drafters:
            drafter.forget(request.name)
        self._stepper.leaves(request.name)

    def _on_drop(self, holder: Holder) -> None:
        """A drafter's KV of a request made room."""
        number = holder.model - 1
        self._models.drafters[number].forget(holder.request)
        self._stepper.caches.lost(number, holder.request)

    # -- a step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Empty where nobody can run."""
        self._now = self._clock()
        plan = self._plan_verify()
        step = self.scheduler.schedule(token_budget=plan.token_budget, admit=plan.admit)
        if not step:
            return []
        began = self._step_clock.mark()
        hidden = self._run(step)
        drawn = self._draw(step, hidden)
        target_s = self._step_clock.seconds(began, self._step_clock.mark())
        number, order = self._plan_draft(step, plan)
        outputs, ran, judged = self._commit(step, drawn)
        report = self._propose(number, order, step, Finished(ran, hidden.between))
        self._observe(report, outputs, target_s, verdicts(judged))
        return outputs

    def _plan_verify(self) -> VerifyPlan:
        with self._loop.lock:  # a hot change waits until all of one decision has looked at the same classes
            self._requests.number_classes(self._loop.class_names)
            return self._plan_verify_now(self.scheduler.running)

    def _plan_verify_now(self, running: Sequence[Request]) -> VerifyPlan:
        if not self._needs_verify_plan(running):
            return self._stepper.nothing_to_verify(len(running))
        room = self._room(self._next(), self._patience_used())
        plan = self._stepper.verify(_view(running), _nodes(running), room)
        first = 0
        for request in running:
            end = first + len(request.proposals)
            request.chosen = np.flatnonzero(plan.nodes[first:end]).tolist()
            first = end
        return plan

    def _needs_verify_plan(self, running: Sequence[Request]) -> bool:
        """Whether there are proposals, or prompts that might break an SLO class's TPOT."""
        if any(len(one.proposals) for one in running):
            return True
        prompts = bool(self.scheduler.waiting) or any(not one.decodes for one in running)
        return prompts and self._loop.has_slo_classes

    def _plan_draft(self, step: Sequence[Scheduled], plan: VerifyPlan) -> tuple[int, Order]:
        """The step's number, and who proposes at its end."""
        requests = [one.request for one in step]
        return self._stepper.draft(
            _view(requests), _column([one.tokens for one in step]), _column([one.proposals for one in step]),
            self._room(), plan, _nodes(requests),
        )  # fmt: skip

    def _run(self, step: Sequence[Scheduled]) -> Hidden:
        return self._models.target.run([_segment(one) for one in step], self._pool, self._models.between)

    def _draw(self, step: Sequence[Scheduled], hidden: Hidden) -> list[Drawn | None]:
        """None for a request whose prompt is not read to its end."""
        wanted, rows, start = list[int](), list[Row](), 0
        for one in step:
            end = start + one.tokens
            if _draws(one):
                wanted += range(end - 1 - one.proposals, end)
                rows += [row_of(one.request, one.request.proposals.path(place)) for place in _places(one)]
            start = end
        if not wanted:
            return [None] * len(step)
        logits = self._models.target.decoder.logits(hidden.last[wanted])
        return _parted(step, logits, rows)

    def _commit(
        self, step: Sequence[Scheduled], drawn: Sequence[Drawn | None]
    ) -> tuple[list[Output], list[Ran], list[Judged]]:
        """Outputs, what goes on, and what became of proposals."""
        outputs, ran, judged, first_row = list[Output](), list[Ran](), list[Judged](), 0
        for place, (one, own) in enumerate(zip(step, drawn, strict=True)):
            request, start = one.request, one.request.computed
            done, kept = None, list(range(one.tokens - one.proposals))
            if own is not None:
                path = walk(request.proposals, own.tokens)
                done = commit(request, path.tokens, self.longest)
                kept += [len(kept) + request.chosen.index(node) for node in path.places[1 : 1 + len(done.tokens)]]
                path = path.until(len(done.tokens))
                judged.append(Judged(request.proposals, request.chosen, path))
                outputs.append(_output(request, done, own, path))
            request.proposals, request.chosen = Tree(), ()
            if done is None or done.finish is None:
                self._models.target.cache[request.name].keep(start, kept)
                request.computed += len(kept)
                ran.append(Ran(request, place, start, [first_row + token for token in kept]))
            first_row += one.tokens
        return outputs, ran, judged

    def _propose(self, number: int, order: Order, step: Sequence[Scheduled], finished: Finished) -> Report:
        self._set_idle(order.runs)
        requests = [one.request for one in step]
        report = draft(self._models.drafters, number, order, requests, finished, self._step_clock)
        for one in finished.ran:
            self._cut_proposals(one.request)
        return report

    def _observe(self, report: Report, outputs: Sequence[Output], target_s: float, judged: Verdicts) -> None:
        self._stepper.news([report])
        now = self._clock()
        tokens = self._requests.deliver(
            [Delivery(one.request, len(one.tokens), End.COMPLETE if one.finish else None) for one in outputs], now
        )
        for one in outputs:
            if one.finish is not None:
                self._leave(self._there[one.request])
        self._stepper.done(report.step, now=now, target_s=target_s, tokens=tokens, verdicts=judged)

    def _cut_proposals(self, request: Request) -> None:
        """No more than could be tokens of its answer, the bonus token beside them."""
        left = min(request.stops.max_tokens - request.emitted, self.longest - len(request.tokens)) - 1
        request.proposals = request.proposals.within(left)

    # -- what decisions hang on ---------------------------------------------------------------------------------

    def _set_idle(self, runs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """runs: (D,), drafters of the last step; who does not run gives up its memory first."""
        models = [number + 1 for number in range(len(runs))]
        self.scheduler.idle_models = [one for one in models if not runs[one - 1]]
        self.scheduler.active_models = [one for one in models if runs[one - 1]]

    def _next(self) -> Waiting | None:
        """Who is let in next, as far as SLO classes ask."""
        if not self.scheduler.waiting or not self._loop.has_slo_classes:
            return None
        request = self.scheduler.waiting[0]
        left = min(request.stops.max_tokens - request.emitted, self.longest - len(request.tokens))
        slo_class = self._requests.class_number(request.name)
        return Waiting(slo_class, request.todo, left, self._now >= request.due_at)

    def _patience_used(self) -> float:
        """By the request that waits in front, or one whose prompt is being read; preempted ones do not count."""
        if not self._loop.has_slo_classes:
            return 0.0
        prompts = [one for one in self.scheduler.running if not one.emitted] + list(self.scheduler.waiting)[:1]
        return patience_used(
            self._now,
            [(self._requests.arrived_at(one.name), one.due_at) for one in prompts if not one.was_preempted],
        )

    def _room(self, waiting: Waiting | None = None, used: float = 0.0) -> Room:
        limits, scheduler = self.scheduler.limits, self.scheduler
        return Room(
            now=self._now, token_budget=limits.tokens, free_kv_tokens=self._pool.free_tokens(TARGET), next=waiting,
            waiting=min(len(scheduler.waiting), limits.requests - len(scheduler.running)), patience_used=used,
        )  # fmt: skip


def _view(requests: Sequence[Request]) -> View:
    return View(
        names=[one.name for one in requests],
        context=_column([one.computed for one in requests]),
        known=_column([len(one.tokens) for one in requests]),
        todo=_column([one.todo for one in requests]),
        emitted=_column([one.emitted for one in requests]),
    )


def _draws(one: Scheduled) -> bool:
    """Its last known token is in the step."""
    return one.tokens - one.proposals == one.request.todo


def _nodes(requests: Sequence[Request]) -> Nodes:
    return nodes_of([one.proposals for one in requests])


def _places(one: Scheduled) -> list[int]:
    """Behind which something is drawn."""
    return [ROOT, *one.request.chosen]


def _segment(one: Scheduled) -> Segment:
    """Known tokens, one after the other, and the chosen nodes behind them."""
    request, known = one.request, one.tokens - one.proposals
    tokens = request.tokens[request.computed : request.computed + known]
    if not one.proposals:
        return Segment(request.name, tokens, request.computed)
    tree = request.proposals.only(request.chosen)
    parents = [*range(ROOT, known - 1), *(known + parent for parent in tree.parents)]  # ROOT is the last known token
    return Segment(request.name, tokens + tree.tokens, request.computed, ancestors(parents))


def _parted(step: Sequence[Scheduled], logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn | None]:
    firsts = np.cumsum([0, *(one.proposals + 1 if _draws(one) else 0 for one in step)]).tolist()
    weights = weights_of(logits, rows)
    chains = [_chain(one, first) for one, first in zip(step, firsts, strict=False) if _draws(one) and _is_drawn(one)]
    tokens = judge(chains, weights, rows, draw(weights, rows))
    return [
        Drawn(logits[first:end], dict(zip(_places(one), tokens[first:end], strict=True))) if end > first else None
        for one, (first, end) in zip(step, pairwise(firsts), strict=True)
    ]


def _is_drawn(one: Scheduled) -> bool:
    return one.proposals > 0 and len(one.request.proposals.drawn_from) > 0


def _chain(one: Scheduled, row: int) -> Chain:
    tree = one.request.proposals
    return Chain(row, tree.tokens[: one.proposals], cast(list[torch.Tensor], tree.drawn_from[: one.proposals]))


def _output(request: Request, done: Committed, drawn: Drawn, path: Path) -> Output:
    most, told = request.sampling.logprobs, list[TokenLogprobs]()
    if most is not None:
        rows = dict(zip(drawn.tokens, drawn.logits, strict=True))
        told = [logprobs_of(rows[place], token, most) for place, token in zip(*path, strict=True)]
    return Output(request.name, done.tokens, done.text, told, done.finish, done.stop_reason)


def _column(values: list[int]) -> Ints:
    return np.array(values, np.int64)
