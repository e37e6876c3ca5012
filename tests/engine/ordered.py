"""An engine whose drafting a test orders, step by step: vLLM's own schedulers, our worker, no control loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import outrider_cpu
from outrider_crds.draft_pool import DrafterSpec
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.vllm_plugin.launch import LaunchPlan, noted_failures
from outrider_runtime.vllm_plugin.messages import (
    DraftOrder,
    DraftReport,
    attach,
    attached_order,
    attached_report,
    idle_order,
)
from outrider_runtime.worker_notes import read_drafter_memory

from tests.engine import engines

SCHEDULER = f"--scheduler-cls={__name__}.ordered_scheduler"
Giver = Callable[[int, list[str], DraftOrder], DraftOrder]
"""Takes a step, its requests and an order in which no drafter runs, and returns the step's order."""


def ordered_scheduler(vllm_config: Any, *arguments: Any, **keywords: Any) -> Any:
    from outrider_runtime.vllm_plugin import draft_room
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    outrider_cpu.allow_second_runner()  # vLLM checks its config once more
    draft_room.install()
    draft_room.reserve_batch_tokens(vllm_config)
    base: Any = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("OrderedScheduler", (Ordered, base), {})(vllm_config, *arguments, **keywords)


class Ordered:
    """All that is proposed is verified, in the order that the test gave."""

    requests: dict[str, Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.give: Giver = lambda _step, _requests, idle: idle
        self.members = 0
        self.steps = itertools.count()
        self.by_step: dict[int, tuple[DraftOrder, DraftReport]] = {}
        """Step -> what was ordered, and what came of it."""
        self.proposals: dict[tuple[int, str, int], list[int]] = {}
        """Member, request, its tokens so far -> what was proposed."""
        self.scheduled: dict[str, int] = {}
        """Request -> tokens of the step that is being ordered."""
        self._given: dict[int, DraftOrder] = {}

    def _update_after_schedule(self, output: Any) -> None:
        self.scheduled = output.num_scheduled_tokens
        step, names = next(self.steps), list(output.num_scheduled_tokens)
        order = self.give(step, names, idle_order(self.members, len(names)))._replace(step=step)
        for place, name in enumerate(names):
            if self._reads_its_prompt(self.requests[name], output.num_scheduled_tokens[name]):
                order.chosen[place] = order.second[place] = NO_DRAFTER
        attach(output, order)
        self._given[step] = order
        output.num_spec_tokens_to_schedule = order.draft_tokens
        super()._update_after_schedule(output)  # type: ignore[misc]

    @staticmethod
    def _reads_its_prompt(request: Any, tokens: int) -> bool:
        known = request.num_tokens + request.num_output_placeholders
        return bool(request.num_computed_tokens + tokens < known)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        order, report = attached_order(scheduler_output), attached_report(model_runner_output)
        made = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for draft in report.drafts if report is not None else ():
            self.by_step[draft.step] = (self._given.pop(draft.step), draft)
        if order is not None and report is not None and report.proposals is not None:
            proposers = dict(
                zip(scheduler_output.num_scheduled_tokens, report.drafts[-1].proposer.tolist(), strict=True)
            )
            self._note(report.proposals, proposers)
            self.update_draft_token_ids(report.proposals)  # type: ignore[attr-defined]
        return made

    def _note(self, proposals: Any, proposers: dict[str, int]) -> None:
        for name, tokens in zip(proposals.req_ids, proposals.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is not None and tokens:
                self.proposals[proposers[name], name.split("-")[0], request.num_tokens] = list(tokens)


class OrderedBench:
    def __init__(self, llm: Any, drafters: Sequence[DrafterSpec], plan: LaunchPlan) -> None:
        self.llm, self.failures = llm, noted_failures(plan)
        self.memory = read_drafter_memory(plan.paths.run_dir)
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = core.scheduler
        self.scheduler.members = len(drafters)
        self.runner = self._runner(core.model_executor)
        self.names = [drafter.name for drafter in drafters]
        self.forwards: dict[int, int] = {}
        """Member -> forward passes since `run` began."""
        self.prompt_tokens: list[int] = []
        """Tokens of each prompt of the last `run`."""
        self.restored_tokens: list[int] = []
        """Tokens of each prompt of the last `run` that the prefix cache held."""
        self.tags: list[str] = []
        """What the engine's start set for compiled code, where a test notes it."""
        self._count_forwards()

    @staticmethod
    def _runner(executor: Any) -> Any:
        """The worker's; None where workers are processes of their own."""
        worker = getattr(executor, "driver_worker", None)
        return worker and worker.worker.model_runner

    def member(self, number: int) -> Any:
        return self.runner.speculator._members[number]

    def _count_forwards(self) -> None:
        for number, member in self.runner.speculator._members.items() if self.runner else ():
            model = getattr(member, "model", None)
            if model is not None:
                model.forward = self._counted(number, model.forward)  # hooks of some of vLLM's models are never called

    def _counted(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **keywords: Any) -> Any:
            self.forwards[number] = self.forwards.get(number, 0) + 1
            return forward(*arguments, **keywords)

        return counting

    def run(
        self, prompts: Sequence[str | engines.RequestArguments], give: Giver, *, arrive_every: int = 0,
        keep_prefixes: bool = False, before_step: Callable[[int], None] = lambda _step: None, **sampling: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Tokens of each prompt; requests are called "0", "1", ... sampling: in addition to a request's own."""
        if not keep_prefixes:
            self.llm.reset_prefix_cache()
        self.forwards.clear()
        scheduler = self.scheduler
        scheduler.give, scheduler.steps = give, itertools.count()
        scheduler.by_step.clear()
        scheduler.proposals.clear()
        engine, tokens = self.llm.llm_engine, {str(index): list[int]() for index in range(len(prompts))}
        self.prompt_tokens, self.restored_tokens = [0] * len(prompts), [0] * len(prompts)
        waiting, step = list(enumerate(prompts)), 0
        while waiting or engine.has_unfinished_requests():
            while waiting and step >= waiting[0][0] * arrive_every:
                index, arguments = waiting.pop(0)
                prompt, own = (arguments, {}) if isinstance(arguments, str) else arguments
                engine.add_request(str(index), prompt, engines._sampling(sampling | own))
            before_step(step)
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                self.prompt_tokens[int(output.request_id)] = len(output.prompt_token_ids)
                self.restored_tokens[int(output.request_id)] = output.num_cached_tokens or 0
            step += 1
        return list(tokens.values())

    @property
    def orders_and_reports(self) -> list[tuple[DraftOrder, DraftReport]]:
        return list(self.scheduler.by_step.values())

    def right(self, number: int, answers: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Count the tokens that this member proposed in the last `run`: those that the answers have there, and all."""
        right = tried = 0
        for (member, name, known), tokens in self.scheduler.proposals.items():
            if member == number:
                answer = answers[int(name)][known - self.prompt_tokens[int(name)] :]
                tried += min(len(tokens), len(answer))
                right += sum(token == other for token, other in zip(tokens, answer, strict=False))
        return right, tried

    def proposed(self, number: int) -> int:
        """Tokens of this member that came back."""
        return sum(int(report.proposed[report.proposer == number].sum()) for _, report in self.orders_and_reports)


@contextmanager
def ordered(
    drafters: Sequence[DrafterSpec], *, asynchronous: bool = False, extra: Sequence[str] = (),
    target: Path = engines.TARGET, ranks: int = 1,
) -> Iterator[OrderedBench]:  # fmt: skip
    """ranks: processes that share the target; with more than one none is this process."""
    made = engines.make_plan(drafters, extra=[SCHEDULER, *extra], target=target)
    engine = made.boot.engine.model_copy(update={"tensor_parallel_size": ranks})
    boot = made.boot.model_copy(update={"engine": engine})
    plan = made.model_copy(update={"pool": HostedPool(hosted=tuple(drafters)), "boot": boot})
    with engines._asynchronous_scheduling() if asynchronous else nullcontext(), engines.engine(plan) as llm:
        yield OrderedBench(llm, drafters, plan)
