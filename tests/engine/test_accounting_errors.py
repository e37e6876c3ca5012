"""A bug in the loop's books about steps and requests costs speculation for a while, and no request its answer.

Real vLLM in this process, both schedulers; planted models, as answers need only stay the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_runtime.loop.draft_caches import DraftCaches
from outrider_runtime.loop.request_table import RequestTable
from outrider_runtime.loop.stepper import Stepper
from outrider_runtime.snapshot import read_snapshot

from tests.engine.engines import Bench, bench, draft_model, eagle, lookup
from tests.engine.planted_models import Counting
from tests.engine.test_lossless_speculation import SHORT, state_of

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
SCHEDULER = "outrider_runtime.vllm_plugin.scheduler"
CALLS: list[tuple[type | str, str]] = [
    (Stepper, "verify"), (Stepper, "draft"), (Stepper, "on_draft_reports"), (Stepper, "on_output"), (Stepper, "leaves"),
    (RequestTable, "arrived"), (RequestTable, "running"), (RequestTable, "deliver"),
    (DraftCaches, "missing"), (DraftCaches, "allocated"),
    (SCHEDULER, "chain_counts"), (SCHEDULER, "deliveries"), (SCHEDULER, "view"),
]  # fmt: skip


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def running(models: Counting, request: pytest.FixtureRequest) -> Iterator[Bench]:
    pool = [lookup(), eagle(models.head), draft_model(models.draft)]
    with bench(pool, target=models.target, asynchronous=request.param == "asynchronous") as started:
        yield started


@pytest.fixture
def engine(running: Bench, plain: list[list[int]]) -> Iterator[Bench]:
    assert plain, "before anything breaks"
    running.fresh()
    yield running
    running.loop._failed_at.clear()
    for drafter in running.plan.pool.hosted:
        running.loop.resume(drafter.name)


@pytest.fixture(scope="module")
def plain(running: Bench) -> list[list[int]]:
    running.loop.pin(0)
    return running.generate(SHORT)


@pytest.mark.parametrize(("books", "call"), CALLS, ids=lambda value: getattr(value, "__name__", value))
def test_engine_survives_a_bug_and_goes_on_speculating(
    engine: Bench, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, books: type | str, call: str
) -> None:
    """Bug: an exception in the books ended the engine, and with it every request of the pod. Later, one suspended all
    drafters for half a minute."""
    before = engine.loop.failures
    engine.loop.pin(2, "draft")
    where = importlib.import_module(books) if isinstance(books, str) else books
    real, calls, no_request = getattr(where, call), [], dict[str, object]()

    def fail_once(*arguments: object, **keywords: object) -> object:
        calls.append(arguments)
        return no_request["of this name"] if len(calls) == 3 else real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(where, call, fail_once)
        assert engine.generate(SHORT, arrive_every=2) == plain
    assert engine.loop.failures == before + 1
    for drafter in engine.plan.pool.hosted:
        assert not state_of(engine, drafter.name).reason


def test_failing_bookkeeping_leaves_plain_decoding(
    engine: Bench, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ordered and no place for proposals is kept, in every step."""
    before = engine.loop.failures
    engine.loop.pin(3, "eagle")

    def fail(*_arguments: object, **_keywords: object) -> object:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "draft", fail)
        assert engine.generate(SHORT) == plain
    assert engine.loop.failures > before + 1
    assert engine.verified() == 0
    for drafter in engine.plan.pool.hosted:
        assert "the control loop raised ZeroDivisionError" in state_of(engine, drafter.name).reason


def test_speculation_comes_back_with_new_books(
    engine: Bench, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks of requests that ran when the books broke carry over."""
    engine.loop.pin(3, "eagle")
    real, calls = Stepper.draft, []

    def fail_once(*arguments: object, **keywords: object) -> object:
        calls.append(arguments)
        return 1 / 0 if len(calls) == 3 else real(*arguments, **keywords)  # type: ignore[arg-type]

    def resume(step: int) -> None:
        if step == 5:
            engine.steps.clear()
            for drafter in engine.plan.pool.hosted:
                engine.loop.resume(drafter.name)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "draft", fail_once)
        assert engine.run([(prompt, {}) for prompt in SHORT], before_step=resume) == plain
    assert engine.accepted("eagle") > 0


def test_the_pods_state_counts_it(engine: Bench) -> None:
    engine.loop.failed(KeyError("a bug"))
    engine.scheduler.outrider_reporter.tick()
    state = read_snapshot(engine.plan.paths.run_dir)
    assert isinstance(state, RuntimeState)
    assert state.loop_failures == engine.loop.failures > 0
