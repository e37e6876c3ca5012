"""One failing drafter must not lose the target's and the other drafters' results, and each failure says why."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from outrider_crds.profile import ProfilingResult, profile_keys
from outrider_crds.runtime_config import boot_config
from outrider_crds.spec import Drafter, DraftMethod, ModelRef, NeuralDraft, SpeculativeServiceSpec
from outrider_runtime.paths import Paths
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.documents import termination_message
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.run import Part, Profiler, Wanted, apart

from tests.engine.engines import eagle, lookup, mtp
from tests.unit.profiler.machine import Machine, starter

VOCABULARY = 1000


def write_model(folder: Path, **config: object) -> str:
    folder.mkdir(parents=True)
    content = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 64, **config}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def reference(name: str, path: str) -> dict[str, object]:
    return {"name": name, "source": {"hostPath": {"path": path}}}


def service(tmp_path: Path, *, target: str | None = None, **draft: object) -> SpeculativeServiceSpec:
    target = target or write_model(tmp_path / "target")
    head = write_model(tmp_path / "head", **{"architectures": ["Eagle3LlamaForCausalLM"], **draft})
    pool = [
        {"name": "lookup", "method": "PromptLookup", "promptLookup": {}},
        {"name": "eagle", "method": "Eagle", "eagle": {"model": reference("head", head)}},
    ]
    return SpeculativeServiceSpec.model_validate(
        {"target": reference("target", target), "draftPool": pool, "accelerator": {"products": ["cpu"]}}
    )


def profile(
    tmp_path: Path, spec: SpeculativeServiceSpec, start, *, target=True, names=("lookup", "eagle"), clock=time.monotonic
):
    boot = boot_config(spec, service="s", namespace="n", revision="r", image="i", max_draft_tokens=4)
    wanted = Wanted(boot, profile_keys(spec, "cpu", "i"), target, tuple(d for d in spec.draft_pool if d.name in names))
    paths = Paths(mounted=False, run_dir=str(tmp_path / "run"))
    return Profiler(wanted, paths, 60.0, lambda _text: None, start, clock).run()


def with_heads(spec: SpeculativeServiceSpec) -> SpeculativeServiceSpec:
    """Medusa heads, which vLLM does not serve, before the pool of a service on vLLM."""
    block = NeuralDraft(model=ModelRef(name="heads"))
    heads = Drafter(name="heads", method=DraftMethod.MEDUSA, medusa=block)
    return spec.model_copy(update={"draft_pool": [heads, *spec.draft_pool]})


def reasons(found) -> dict[str, str]:
    return {failure.drafter: failure.reason for failure in found.failures}


def test_everything_that_was_asked_for_is_measured_in_one_engine_start(tmp_path):
    """The engine's start is the longest part of a small profile: target and both drafters share one."""
    plans = []
    machine = Machine(noise=0.02)

    @contextmanager
    def start(_backend, launch):
        plans.append(launch)
        yield machine

    found = profile(tmp_path, service(tmp_path), start)
    assert reasons(found) == {}
    assert found.target is not None
    assert found.target.device == "Synthetic 9000"
    assert found.target.error_percent <= 10
    assert {d.name: d.autoregressive for d in found.drafters} == {"lookup": False, "eagle": True}
    assert len(plans) == 1


def test_unsupported_drafter_fails_and_costs_the_others_nothing(tmp_path):
    """A Job's document may come from an operator of another release, whose rules allow the method."""
    spec = with_heads(service(tmp_path))
    found = profile(tmp_path, spec, starter(Machine()), names=("lookup", "eagle", "heads"))
    assert reasons(found) == {"heads": "DrafterFailed"}
    assert "Unsupported" in found.failures[0].message
    assert {d.name for d in found.drafters} == {"lookup", "eagle"}


def test_a_patched_in_draft_costs_one_drafters_measurement(tmp_path):
    """The target's grid is not measured again for a new drafter, and its profile is not touched."""
    machine = Machine()
    found = profile(tmp_path, service(tmp_path), starter(machine), target=False, names=("eagle",))
    assert found.target is None
    assert [d.name for d in found.drafters] == ["eagle"]
    assert {ask.drafter for ask in machine.asked} == {"eagle"}
    assert machine.now < 30


def test_a_draft_of_another_vocabulary_is_named_and_the_rest_is_measured(tmp_path):
    """Known before any engine starts; the message names both sizes."""
    found = profile(tmp_path, service(tmp_path, vocab_size=7), starter(Machine()))
    assert reasons(found) == {"eagle": "VocabularyMismatch"}
    assert "7 tokens" in found.failures[0].message
    assert found.target is not None
    assert [d.name for d in found.drafters] == ["lookup"]


def test_a_target_that_is_not_there_is_said_before_any_engine_starts(tmp_path):
    """A wrong path in the manifest: the sentence names the folder."""

    def start(_backend, _launch):
        raise AssertionError("no engine is needed to see that a folder is missing")

    found = profile(tmp_path, service(tmp_path, target=str(tmp_path / "nowhere")), start)
    assert reasons(found) == {"": "ModelNotFound"}
    assert "nowhere" in found.failures[0].message


def test_a_draft_folder_that_is_not_there_costs_only_that_drafter(tmp_path):
    spec = service(tmp_path)
    (tmp_path / "head" / "config.json").unlink()
    found = profile(tmp_path, spec, starter(Machine()))
    assert reasons(found) == {"eagle": "ModelNotFound"}
    assert found.target is not None


def test_a_head_that_brings_the_engine_down_at_its_start_is_left_out(tmp_path):
    """The engine is started again without it; target and prompt lookup are measured."""

    @contextmanager
    def start(_backend, launch):
        if launch.pool.neural:
            raise ProfilingError("EngineFailed", "the engine process ended with code 1; its last lines: size mismatch")
        yield Machine()

    found = profile(tmp_path, service(tmp_path), start)
    assert reasons(found) == {"eagle": "DrafterFailed"}
    assert "size mismatch" in found.failures[0].message
    assert found.target is not None
    assert [d.name for d in found.drafters] == ["lookup"]


def test_a_head_that_crashes_the_engine_while_it_is_measured_loses_nothing_else(tmp_path):
    """Shapes of the target that were measured before the crash count; what is missing is measured without the head."""
    machine = Machine(dies_on="eagle")
    found = profile(tmp_path, service(tmp_path), starter(machine))
    assert reasons(found) == {"eagle": "DrafterFailed"}
    assert "-11" in found.failures[0].message
    assert found.target is not None
    assert [d.name for d in found.drafters] == ["lookup"]


def test_an_engine_that_never_starts_fails_target_and_drafters_with_its_own_words(tmp_path):
    @contextmanager
    def start(_backend, _launch):
        raise ProfilingError("OutOfMemory", "no available memory for the cache blocks")
        yield

    found = profile(tmp_path, service(tmp_path), start)
    assert found.target is None
    assert found.drafters == []
    assert reasons(found) == {"eagle": "OutOfMemory", "": "OutOfMemory", "lookup": "OutOfMemory"}


def with_two_heads(tmp_path: Path) -> SpeculativeServiceSpec:
    spec = service(tmp_path)
    second = spec.draft_pool[1].model_copy(update={"name": "eagle-2"})
    return spec.model_copy(update={"draft_pool": [*spec.draft_pool, second]})


def pool_of(hosted: list[list[str]], *, dies_on: str = "", fails: str = ""):
    """Engines that host any pool; what each hosts is noted. fails: none starts with this drafter."""

    @contextmanager
    def start(_backend, launch):
        hosted.append([one.name for one in launch.pool.neural])
        if fails in hosted[-1]:
            raise ProfilingError("OutOfMemory", "no available memory for the cache blocks")
        machine = Machine(dies_on=dies_on)
        machine.drafters["eagle-2"] = machine.drafters["eagle"]
        yield machine

    return start


ALL = ("lookup", "eagle", "eagle-2")


def test_two_neural_drafters_are_measured_in_one_engine(tmp_path):
    """As they serve. Bug: the second was measured in an engine without the first."""
    hosted: list[list[str]] = []
    found = profile(tmp_path, with_two_heads(tmp_path), pool_of(hosted), names=ALL)
    assert hosted == [["eagle", "eagle-2"]]
    assert {d.name for d in found.drafters} == {*ALL}
    assert found.failures == []


def test_of_two_neural_drafters_the_one_that_ran_is_to_blame(tmp_path):
    hosted: list[list[str]] = []
    found = profile(tmp_path, with_two_heads(tmp_path), pool_of(hosted, dies_on="eagle-2"), names=ALL)
    assert reasons(found) == {"eagle-2": "DrafterFailed"}
    assert found.target is not None
    assert {d.name for d in found.drafters} == {"lookup", "eagle"}


def test_where_any_drafter_may_be_to_blame_each_has_an_engine_of_its_own(tmp_path):
    hosted: list[list[str]] = []
    found = profile(tmp_path, with_two_heads(tmp_path), pool_of(hosted, fails="eagle-2"), names=ALL)
    assert hosted == [["eagle", "eagle-2"], ["eagle"], ["eagle-2"]]
    assert reasons(found) == {"eagle-2": "OutOfMemory"}
    assert found.target is not None
    assert {d.name for d in found.drafters} == {"lookup", "eagle"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "OutOfMemory"),
        (ValueError("No available memory for the cache blocks"), "OutOfMemory"),
        (MemoryError(), "OutOfMemory"),
        (OSError("x/y is not a valid model identifier listed on the hub"), "ModelNotFound"),
        (RuntimeError("Cannot find any model weights with `/m`"), "ModelNotFound"),
        (RuntimeError("something else broke"), "EngineFailed"),
    ],
)
def test_what_the_engine_raised_becomes_a_reason(error, reason):
    """Reasons are what a condition shows and what a user searches for."""
    assert failures.of_exception(error).reason == reason


def test_the_cause_of_an_error_counts_too():
    """vLLM wraps what its worker raised."""
    try:
        try:
            raise MemoryError("cannot allocate")
        except MemoryError as cause:
            raise RuntimeError("Engine core initialization failed") from cause
    except RuntimeError as error:
        found = failures.of_exception(error)
    assert found.reason == "OutOfMemory"
    assert "cannot allocate" in found.message


def test_a_killed_engine_process_means_memory_and_says_what_to_raise():
    found = failures.of_exit(-9, "loading weights")
    assert found.reason == "OutOfMemory"
    assert "limits.memory" in found.message


def test_the_result_fits_a_termination_message_whatever_failed(tmp_path):
    """Kubernetes cuts termination messages at 4096 bytes; a cut result would be no JSON."""
    found = profile(tmp_path, service(tmp_path), starter(Machine(noise=0.1))).result()
    pool = found.drafters * 4
    many = [failures.failure("DrafterFailed", "kaputt ✗ " * 200, f"drafter-{i}") for i in range(8)]
    text = termination_message(found.model_copy(update={"drafters": pool, "failures": many}))
    assert len(text.encode()) <= 4096
    parsed = ProfilingResult.model_validate_json(text)
    assert parsed.target == found.target
    assert parsed.drafters == pool
    assert len(parsed.failures) == 8


def test_a_result_reads_back_as_it_was(tmp_path):
    """The operator stores what it parses from the message."""
    found = profile(tmp_path, service(tmp_path), starter(Machine())).result()
    assert ProfilingResult.model_validate_json(termination_message(found)) == found
    assert abs(time.time() - time.mktime(time.strptime(found.target.measured_at, "%Y-%m-%dT%H:%M:%SZ"))) < 86_400


def test_mtp_is_measured_apart_from_a_head() -> None:
    """Bug: MTP has no model of its own, so it went with the lookups; what failed in it was blamed on the head."""
    pool = (lookup(), mtp(), eagle())
    parts = [part.names for part in apart(Part(target=True, drafters=pool))]
    assert parts == [["", "pld", "mtp"], ["eagle"]]
