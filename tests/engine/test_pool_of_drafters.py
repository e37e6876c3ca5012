"""The pool as one speculator: members that run, proposals that count, and the report. Members are stand-ins here; real
ones are in tests/engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.loop.confidences import Calibration
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.step_clock import HostClock
from outrider_runtime.vllm_plugin.agreement import Agreement, alone
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep
from outrider_runtime.vllm_plugin.messages import IDLE, DraftOrder, numbers
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
FILLER = 0
MOST, VOCABULARY, REQUESTS = 3, 100, 4
NAMES = ["a", "b", "c", "d"]


class Member:
    """Proposes `token`, `token + 1`, ... for every request; `found` as a lookup tells it."""

    def __init__(
        self, token: int, follow_up_tokens: list[int] | None = None, evidence: list[float] | None = None
    ) -> None:  # fmt: skip
        """evidence: confidence in each token of a request's row."""
        self.token, self.draft_lengths = token, list[int]()
        if follow_up_tokens is not None:
            self.follow_up_tokens = torch.tensor(follow_up_tokens)
        if evidence is not None:
            self.evidence = torch.tensor(evidence)[:, None].expand(-1, MOST)

    def propose(self, batch: Any, *_: Any, num_speculative_tokens: int = MOST, **__: Any) -> Any:
        self.draft_lengths.append(num_speculative_tokens)
        return (self.token + torch.arange(MOST)).expand(batch.num_reqs, MOST)

    def capture(self) -> None:
        self.draft_lengths.append(-1)


class DeviceBehind(HostClock):
    """A simulated asynchronous device: a tick a mark, and nothing has passed until `arrive`."""

    def __init__(self) -> None:
        self.ticks, self.reached = 0, 0

    def mark(self) -> int:
        self.ticks += 1
        return self.ticks

    def passed(self, mark: float) -> bool:
        return mark <= self.reached

    def arrive(self) -> None:
        self.reached = self.ticks


def pool(
    *makers: Callable[[], Any], note_failure: Callable[[str, Exception | None], None] = print, agree: Agreement = alone
) -> Any:
    """Make a pool of these members. note_failure: called for each member that cannot be made."""
    from outrider_runtime.vllm_plugin import cpu_worker  # binds vLLM's kernels before the next line binds others
    from outrider_runtime.vllm_plugin.speculator import PoolSpeculator

    assert cpu_worker
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    named = [(f"member {number}", make) for number, make in enumerate(makers)]
    return PoolSpeculator(named, config, torch.device("cpu"), note_failure, agree)


def order(passes: list[int], chosen: list[int], second: list[int] | None = None, **fields: Any) -> DraftOrder:
    no_drafter = [NO_DRAFTER] * len(chosen)
    return DraftOrder(max(0, *passes), numbers(passes), numbers(chosen), numbers(second or no_drafter), **fields)


def rows_of(names: list[str]) -> Any:
    return SimpleNamespace(num_reqs=len(names), req_ids=names, idx_mapping=torch.arange(len(names)))


def drafted(
    members: list[Any], draft_order: DraftOrder, batch: list[str] = NAMES, clock: Any = None
) -> tuple[Any, Any]:
    """The step, and the rows in the batch's order."""
    makers = [lambda member=member: member for member in members]
    speculator, step = pool(*makers), DraftingStep(draft_order, NAMES, clock or HostClock())
    speculator.serve_ranking(device_ranks=True)
    speculator.step = step
    rows = speculator.propose(rows_of(batch), None, None, torch.zeros(1), None)
    return step, rows.tolist()


def test_request_gets_the_proposals_of_its_chosen_drafter() -> None:
    """The worker may run the requests in any order."""
    step, rows = drafted([Member(10), Member(20)], order([3, 2], [0, 1, NO_DRAFTER, 0]), batch=["d", "c", "b", "a"])
    report = step.report()
    assert report.proposer.tolist() == [0, 1, NO_DRAFTER, 0]
    assert report.proposed.tolist() == [3, 2, 0, 3]
    assert rows == [[10, 11, 12], [FILLER] * 3, [20, 21, FILLER], [10, 11, 12]]


def test_idle_member_does_not_run() -> None:
    """Promise: at K = 0 nothing is drafted; and a draft may run its first pass alone."""
    idle, other = Member(10), Member(20)
    step, _ = drafted([idle, other], order([IDLE, 0], [NO_DRAFTER] * 4))
    assert (idle.draft_lengths, other.draft_lengths) == ([], [0])
    report = step.report()
    assert math.isnan(report.seconds[0])
    assert report.seconds[1] >= 0
    assert report.proposed.tolist() == [0] * 4


def test_second_drafter_serves_what_the_first_misses() -> None:
    lookup, head = Member(10, follow_up_tokens=[0, 2, 0, 1], evidence=[0.0, 4.0, 0.0, 3.0]), Member(20)
    step, rows = drafted([lookup, head], order([3, 1], [0, 0, 0, NO_DRAFTER], second=[1, 1, NO_DRAFTER, NO_DRAFTER]))
    assert step.report().proposer.tolist() == [1, 0, NO_DRAFTER, NO_DRAFTER]
    assert step.report().proposed.tolist() == [1, 2, 0, 0]
    confidence = step.report().confidence
    assert confidence.tolist() == [[-128] * 3, [32, 32, -128], [-128] * 3, [-128] * 3], "of the lookup's own proposals"
    assert rows == [[20, FILLER, FILLER], [10, 11, FILLER], [FILLER] * 3, [FILLER] * 3]


def test_request_gets_the_proposals_that_are_worth_more() -> None:
    """Promise: a suffix drafter that proposes for nearly every context does not replace a head that knows better."""
    calibration = Calibration(np.array([1, 1], np.float32), np.array([[0, 0, 0], [1, 1, 1]], np.float32))
    draft_order = order([3, 2], [0] * 4, second=[1, 1, 1, NO_DRAFTER], calibration=calibration)
    step, rows = drafted([Member(10, evidence=[4.0, -4.0, 0.0, -4.0]), Member(20)], draft_order)
    assert step.report().proposer.tolist() == [0, 1, 1, 0]
    assert rows == [[10, 11, 12], [20, 21, FILLER], [20, 21, FILLER], [10, 11, 12]]
    assert step.report().confidence.tolist()[1] == [-128] * 3, "of the proposals that count"


@pytest.mark.parametrize("stray", [-1, VOCABULARY, 2**30])
def test_token_outside_the_targets_vocabulary_ends_the_row(stray: int) -> None:
    """Bug: padding behind a short draft was taken for nonsense, and a good drafter was suspended for it. And the
    target's embedding has no row for such a number: the engine would end with all requests."""

    class Stray(Member):
        def propose(self, *arguments: Any, **keywords: Any) -> Any:
            made = super().propose(*arguments, **keywords).clone()
            made[1, 1] = stray
            return made

    step, rows = drafted([Stray(10)], order([3], [0] * 4))
    assert step.report().proposed.tolist() == [3, 1, 3, 3]
    assert rows[1] == [10, FILLER, FILLER]
    assert not step.report().failures


def test_a_member_that_raises_costs_its_own_proposals_only() -> None:
    class Broken(Member):
        def propose(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("out of workspace\nand more")

    step, _ = drafted([Broken(10), Member(20)], order([3, 3], [0, 1, 0, 1]))
    report = step.report()
    assert report.failures == {0: "RuntimeError: out of workspace"}
    assert report.proposed.tolist() == [0, 3, 0, 3]
    assert math.isnan(report.seconds[0])


def test_gaps_are_filled_by_the_draft_model_that_has_them() -> None:
    closed = []

    class Draft(Member):
        def fill_gaps(self, gaps: Any, _batch: Any) -> None:
            closed.append(gaps)

    gaps = (KVGap(1, 2, 5, 9),)
    step, _ = drafted([Member(10), Draft(20)], order([IDLE, 2], [1] * 4, gaps=gaps), batch=["c", "a", "b", "d"])
    assert closed == [[KVGap(1, 0, 5, 9)]], "the request's row in the batch"
    assert step.report().catch_up_s[1] >= 0


def test_failed_gap_filling_leaves_only_its_own_gaps() -> None:
    """Bug: gaps that one draft model failed to fill were reported as filled when another one filled its own."""

    class Draft(Member):
        def fill_gaps(self, *_: Any) -> None:
            """It takes hardly any time."""

    class Broken(Member):
        def fill_gaps(self, *_: Any) -> None:
            raise RuntimeError("out of workspace")

    gaps = (KVGap(0, 0, 5, 9), KVGap(1, 0, 5, 9))
    report = drafted([Broken(10), Draft(20)], order([2, 2], [0, 1, 0, 1], gaps=gaps))[0].report()
    assert set(report.catch_up_s) == {1}
    assert set(report.failures) == {0}
    assert report.proposed.tolist() == [0, 2, 0, 2]


def test_report_waits_for_the_device_and_the_step_does_not() -> None:
    """Promise: in an asynchronous step the host never waits; what the drafters took is the device's own time."""
    clock = DeviceBehind()
    step, _ = drafted([Member(10)], order([3], [0] * 4), clock=clock)
    assert not step.over
    clock.arrive()
    assert step.over
    assert step.report().seconds.tolist() == [1.0]


class NoHostWait(TorchDispatchMode):
    """Raises at a value of a tensor, or a shape that depends on one: the host would wait for the device."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
        torch.ops.aten.masked_select.default,
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_assigning_proposals_does_not_wait_for_the_device() -> None:
    """Promise: the host schedules the next step while the device drafts, however many members run."""
    members = [Member(10, follow_up_tokens=[0, 2, 3, 1]), Member(20), Member(30)]
    with NoHostWait():
        step, _ = drafted(members, order([3, 2, 1], [0, 1, 2, 0], second=[1, NO_DRAFTER, NO_DRAFTER, NO_DRAFTER]))
    assert step.report().proposed.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suffix_member_proposes_without_waiting(device: str) -> None:
    """Promise: a GPU's search proposes the same; here its operations run on the CPU's tensors."""
    from outrider_runtime.vllm_plugin.suffix_member import SuffixMember

    texts = torch.tensor([[1, 2, 3, 1, 2, 9], [5, 6, 5, 6, 5, 6], [1, 2, 1, 2, 1, 2]], dtype=torch.int32)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=texts), total_len=SimpleNamespace(gpu=torch.tensor([5, 5, 4]))
    )
    batch = SimpleNamespace(
        num_reqs=3, idx_mapping=torch.tensor([2, 0, 1], dtype=torch.int32), seq_lens_cpu_upper_bound=torch.tensor([4])
    )
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=MOST))
    member = SuffixMember(config, torch.device(device), states, MatchLengths(1, 16))
    with NoHostWait():
        rows = member.propose(batch, None, None, None, None, torch.tensor([1, 2, 0]))
    assert member.follow_up_tokens.tolist() == [MOST, MOST, 0], "the last request has sampled no token"
    assert rows[:2].tolist() == [[1, 2, 1], [3, 1, 2]]
    assert member.evidence.shape == (3, MOST)
    dummy = batch.__dict__ | {"seq_lens_cpu_upper_bound": None}
    member.propose(SimpleNamespace(**dummy), None, None, None, None, torch.tensor([1, 1, 1]), dummy_run=True)


def test_a_device_ranks_proposals_without_waiting() -> None:
    """The batch's size is fixed before, so the host launches the step and never asks what was chosen."""
    from tests.engine.test_device_ranking import ranked_steps

    with NoHostWait():
        steps = ranked_steps(3, slots_from=0, host_knows_proposals=False)
    assert len(steps) == 3


def test_member_that_cannot_be_built_leaves_other_numbers_alone() -> None:
    """Its layers, half registered, must not get memory of the KV cache; its number stays its own."""
    noted: dict[str, str] = {}

    def broken() -> Any:
        raise ValueError("size mismatch")

    speculator = pool(broken, lambda: Member(20), note_failure=lambda name, error: noted.__setitem__(name, str(error)))
    assert noted == {"member 0": "size mismatch"}
    speculator.step = DraftingStep(order([3, 3], [0, 1, 1, 1]), NAMES, HostClock())
    speculator.propose(rows_of(NAMES), None, None, torch.zeros(1), None)
    assert speculator.step.report().proposed.tolist() == [0, 3, 3, 3]


def test_member_that_cannot_be_loaded_leaves_no_layer_behind() -> None:
    """What stays in vLLM's book of layers gets its part of every token's KV."""
    speculator = pool(lambda: Member(10), lambda: Member(20))
    layers = speculator.vllm_config.compilation_config.static_forward_context
    layers["model.layers.0.attn"] = "the target's"

    def load(name: str, *, fails: bool) -> None:
        layers[name] = "a drafter's"
        if fails:
            raise RuntimeError("no weights")

    speculator._drop_on_failure(lambda: load("drafter_0.layers.0.attn", fails=True), 0)
    speculator._drop_on_failure(lambda: load("drafter_1.layers.0.attn", fails=False), 1)
    assert set(layers) == {"model.layers.0.attn", "drafter_1.layers.0.attn"}
    assert list(speculator._members) == [1]


def test_failed_graph_capture_ends_the_start_with_a_note() -> None:
    """The next start leaves it out for the note; the members after it have done nothing wrong."""

    class Broken(Member):
        def capture(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    noted = dict[str, str]()
    speculator = pool(
        lambda: Broken(10), lambda: Broken(20), note_failure=lambda name, error: noted.__setitem__(name, str(error))
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="'member 0' cannot be started: the engine starts again without it"):
        speculator.capture()
    assert noted == {"member 0": "operation not permitted when stream is capturing"}


@given(
    match_tokens=st.lists(st.integers(0, MOST), min_size=4, max_size=4),
    chosen=st.lists(st.integers(-1, 1), min_size=4, max_size=4),
    second=st.lists(st.integers(-1, 1), min_size=4, max_size=4),
    passes=st.lists(st.integers(1, MOST), min_size=2, max_size=2),
)
def test_row_holds_the_proposals_of_one_drafter_only(
    match_tokens: list[int], chosen: list[int], second: list[int], passes: list[int]
) -> None:
    step, rows = drafted([Member(10, match_tokens), Member(20)], order(passes, chosen, second))
    report = step.report()
    room = [np.minimum(match_tokens, passes[0]), [passes[1]] * 4]
    for request in range(4):
        able = [
            drafter
            for drafter in (chosen[request], second[request])
            if drafter != NO_DRAFTER and room[drafter][request]
        ]
        expected_drafter = able[0] if able else NO_DRAFTER
        count = int(room[expected_drafter][request]) if able else 0
        assert (report.proposer[request], report.proposed[request]) == (expected_drafter, count)
        base = 10 * (expected_drafter + 1)
        assert rows[request] == [*range(base, base + count), *[FILLER] * (MOST - count)]
