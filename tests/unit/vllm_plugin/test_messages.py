"""The loop's order in the arrays that the worker gets."""

from __future__ import annotations

import pickle

import numpy as np
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.orders import Order
from outrider_runtime.vllm_plugin.messages import IDLE, draft_order


def order(passes: list[int], drafter_order: list[list[int]], runs: list[bool], *gaps: KVGap) -> Order:
    feed = np.zeros((len(passes), len(drafter_order[0])), np.int64)
    plan = DraftPlan(np.array(passes), np.ones(len(passes), np.int64), np.array(drafter_order), feed, Purpose.CHOICE)
    return Order(plan, np.array(runs), gaps)


def test_worker_gets_first_and_second_drafter() -> None:
    message = draft_order(7, order([3, 2, 0], [[0, 1], [1, NO_DRAFTER]], [True, True, False]))
    assert (message.step, message.draft_tokens) == (7, 3)
    assert message.chosen.tolist() == [0, 1]
    assert message.second.tolist() == [1, NO_DRAFTER]
    assert message.passes.tolist() == [3, 2, IDLE]


def test_a_head_that_only_reads_runs_its_first_pass() -> None:
    message = draft_order(1, order([0], [[NO_DRAFTER]], [True]))
    assert message.passes.tolist() == [0]
    assert message.second.tolist() == [NO_DRAFTER]


def test_an_order_crosses_processes_whole() -> None:
    sent = draft_order(1, order([2], [[0, 0]], [True], KVGap(0, 1, 3, 9)))
    got = pickle.loads(pickle.dumps(sent))
    assert got.gaps_of(0) == [KVGap(0, 1, 3, 9)]
    assert got.passes.tolist() == sent.passes.tolist()
