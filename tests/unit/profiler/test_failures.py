"""One failing drafter must not lose the target's and the other drafters' results, and each failure says why."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from outrider_crds.draft_pool import DrafterSpec, DraftMethod, NeuralDraft
from outrider_crds.model_sources import ModelRef
from outrider_crds.profile import ProfilingResult
from outrider_crds.profile_keys import profile_keys
from outrider_crds.runtime_config import boot_config
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_runtime.paths import Paths
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.documents import termination_message
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.run import EnginePart, Profiler, ProfilingTask, separate

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
    task = ProfilingTask(
        boot, profile_keys(spec, "cpu", "i"), target, tuple(d for d in spec.draft_pool if d.name in names)
    )
    paths = Paths(mounted=False, run_dir=str(tmp_path / "run"))
    return Profiler(task, paths, 60.0, lambda _text: None, start, clock).run()


def with_heads(spec: SpeculativeServiceSpec) -> SpeculativeServiceSpec:
    """Medusa heads, which vLLM does not serve, before the pool of a service on vLLM."""
    block = NeuralDraft(model=ModelRef(name="heads"))
    heads = DrafterSpec(name="heads", method=DraftMethod.MEDUSA, medusa=block)
    return spec.model_copy(update={"draft_pool": [heads, *spec.draft_pool]})


def reasons(result) -> dict[str, str]:
    return {failure.drafter: failure.reason for failure in result.failures}


def test_target_and_drafters_are_measured_in_one_engine(tmp_path):
    """The engine's start is the longest part of a small profile: target and both drafters share one."""
    plans = []
    machine = Machine(noise=0.02)

    @contextmanager
    def start(_backend, launch):
        plans.append(launch)
        yield machine

    result = profile(tmp_path, service(tmp_path), start)
    assert reasons(result) == {}
    assert result.target is not None
    assert result.target.device == "Synthetic 9000"
    assert result.target.error_percent <= 10
    assert {d.name: d.autoregressive for d in result.drafters} == {"lookup": False, "eagle": True}
    assert len(plans) == 1


def test_unsupported_drafter_fails_alone(tmp_path):
    """A Job's document may come from an operator of another release, whose rules allow the method."""
    spec = with_heads(service(tmp_path))
    result = profile(tmp_path, spec, starter(Machine()), names=("lookup", "eagle", "heads"))
    assert reasons(result) == {"heads": "DrafterFailed"}
    assert "Unsupported" in result.failures[0].message
    assert {d.name for d in result.drafters} == {"lookup", "eagle"}


def test_added_drafter_is_measured_without_the_target(tmp_path):
    """The target's grid is not measured again for a new drafter, and its profile is not touched."""
    machine = Machine()
    result = profile(tmp_path, service(tmp_path), starter(machine), target=False, names=("eagle",))
    assert result.target is None
    assert [d.name for d in result.drafters] == ["eagle"]
    assert {order.drafter for order in machine.orders} == {"eagle"}
    assert machine.time_s < 30


def test_draft_with_another_vocabulary_fails_alone(tmp_path):
    """Known before any engine starts; the message names both sizes."""
    result = profile(tmp_path, service(tmp_path, vocab_size=7), starter(Machine()))
    assert reasons(result) == {"eagle": "VocabularyMismatch"}
    assert "7 tokens" in result.failures[0].message
    assert result.target is not None
    assert [d.name for d in result.drafters] == ["lookup"]


def test_missing_target_fails_before_an_engine_starts(tmp_path):
    """A wrong path in the manifest: the sentence names the folder."""

    def start(_backend, _launch):
        raise AssertionError("no engine is needed to see that a folder is missing")

    result = profile(tmp_path, service(tmp_path, target=str(tmp_path / "nowhere")), start)
    assert reasons(result) == {"": "ModelNotFound"}
    assert "nowhere" in result.failures[0].message


def test_missing_draft_folder_fails_that_drafter_alone(tmp_path):
    spec = service(tmp_path)
    (tmp_path / "head" / "config.json").unlink()
    result = profile(tmp_path, spec, starter(Machine()))
    assert reasons(result) == {"eagle": "ModelNotFound"}
    assert result.target is not None


def test_head_that_breaks_the_engines_start_fails_alone(tmp_path):
    """The engine is started again without it; target and prompt lookup are measured."""

    @contextmanager
    def start(_backend, launch):
        if launch.pool.neural:
            raise ProfilingError("EngineFailed", "the engine process ended with code 1; its last lines: size mismatch")
        yield Machine()

    result = profile(tmp_path, service(tmp_path), start)
    assert reasons(result) == {"eagle": "DrafterFailed"}
    assert "size mismatch" in result.failures[0].message
    assert result.target is not None
    assert [d.name for d in result.drafters] == ["lookup"]


def test_head_that_crashes_the_engine_fails_alone(tmp_path):
    """Shapes of the target that were measured before the crash count; what is missing is measured without the head."""
    machine = Machine(dies_on="eagle")
    result = profile(tmp_path, service(tmp_path), starter(machine))
    assert reasons(result) == {"eagle": "DrafterFailed"}
    assert "-11" in result.failures[0].message
    assert result.target is not None
    assert [d.name for d in result.drafters] == ["lookup"]


def test_engine_that_never_starts_fails_all_with_its_error(tmp_path):
    @contextmanager
    def start(_backend, _launch):
        raise ProfilingError("OutOfMemory", "no available memory for the cache blocks")
        yield

    result = profile(tmp_path, service(tmp_path), start)
    assert result.target is None
    assert result.drafters == []
    assert reasons(result) == {"eagle": "OutOfMemory", "": "OutOfMemory", "lookup": "OutOfMemory"}


def with_two_heads(tmp_path: Path) -> SpeculativeServiceSpec:
    spec = service(tmp_path)
    second = spec.draft_pool[1].model_copy(update={"name": "eagle-2"})
    return spec.model_copy(update={"draft_pool": [*spec.draft_pool, second]})


def pool_of(hosted: list[list[str]], *, dies_on: str = "", fails: str = ""):
    """Engines that host any pool; what each hosts is noted. fails: none starts with this drafter."""

    @contextmanager
    def start(_backend, launch):
        hosted.append([drafter.name for drafter in launch.pool.neural])
        if fails in hosted[-1]:
            raise ProfilingError("OutOfMemory", "no available memory for the cache blocks")
        machine = Machine(dies_on=dies_on)
        machine.drafters["eagle-2"] = machine.drafters["eagle"]
        yield machine

    return start


ALL = ("lookup", "eagle", "eagle-2")


def test_two_neural_drafters_are_measured_in_one_engine(tmp_path):
    """Both run in one engine when they serve. Bug: the second was measured in an engine without the first."""
    hosted: list[list[str]] = []
    result = profile(tmp_path, with_two_heads(tmp_path), pool_of(hosted), names=ALL)
    assert hosted == [["eagle", "eagle-2"]]
    assert {d.name for d in result.drafters} == {*ALL}
    assert result.failures == []


def test_drafter_that_ran_at_the_crash_fails(tmp_path):
    hosted: list[list[str]] = []
    result = profile(tmp_path, with_two_heads(tmp_path), pool_of(hosted, dies_on="eagle-2"), names=ALL)
    assert reasons(result) == {"eagle-2": "DrafterFailed"}
    assert result.target is not None
    assert {d.name for d in result.drafters} == {"lookup", "eagle"}


def test_unclear_failure_gives_each_drafter_its_own_engine(tmp_path):
    hosted: list[list[str]] = []
    result = profile(tmp_path, with_two_heads(tmp_path), pool_of(hosted, fails="eagle-2"), names=ALL)
    assert hosted == [["eagle", "eagle-2"], ["eagle"], ["eagle-2"]]
    assert reasons(result) == {"eagle-2": "OutOfMemory"}
    assert result.target is not None
    assert {d.name for d in result.drafters} == {"lookup", "eagle"}


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
def test_exception_of_the_engine_becomes_a_reason(error, reason):
    """Reasons are what a condition shows and what a user searches for."""
    assert failures.classify_exception(error).reason == reason


def test_cause_of_an_exception_decides_the_reason():
    """vLLM wraps what its worker raised."""
    try:
        try:
            raise MemoryError("cannot allocate")
        except MemoryError as cause:
            raise RuntimeError("Engine core initialization failed") from cause
    except RuntimeError as error:
        result = failures.classify_exception(error)
    assert result.reason == "OutOfMemory"
    assert "cannot allocate" in result.message


def test_killed_engine_process_is_out_of_memory():
    result = failures.classify_exit(-9, "loading weights")
    assert result.reason == "OutOfMemory"
    assert "limits.memory" in result.message


def test_result_with_many_failures_fits_a_termination_message(tmp_path):
    """Kubernetes cuts termination messages at 4096 bytes; a cut result would be no JSON."""
    result = profile(tmp_path, service(tmp_path), starter(Machine(noise=0.1))).result()
    pool = result.drafters * 4
    many = [failures.failure("DrafterFailed", "kaputt ✗ " * 200, f"drafter-{i}") for i in range(8)]
    text = termination_message(result.model_copy(update={"drafters": pool, "failures": many}))
    assert len(text.encode()) <= 4096
    parsed = ProfilingResult.model_validate_json(text)
    assert parsed.target == result.target
    assert parsed.drafters == pool
    assert len(parsed.failures) == 8


def test_result_reads_back_unchanged(tmp_path):
    """The operator stores what it parses from the message."""
    result = profile(tmp_path, service(tmp_path), starter(Machine())).result()
    assert ProfilingResult.model_validate_json(termination_message(result)) == result
    assert abs(time.time() - time.mktime(time.strptime(result.target.measured_at, "%Y-%m-%dT%H:%M:%SZ"))) < 86_400


def test_mtp_is_measured_apart_from_a_head() -> None:
    """Bug: MTP has no model of its own, so it went with the lookups, and its failure was attributed to the head."""
    pool = (lookup(), mtp(), eagle())
    parts = [part.names for part in separate(EnginePart(target=True, drafters=pool))]
    assert parts == [["", "pld", "mtp"], ["eagle"]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("org/m cannot be downloaded from the hub: Server error '503 Service Unavailable' for url", "HubUnavailable"),
        ("We couldn't connect to 'https://huggingface.co' to load the files", "HubUnavailable"),
        ("org/m cannot be downloaded from the hub: Client error '404 Not Found' for url", "ModelNotFound"),
    ],
)
def test_hub_that_is_away_is_not_a_missing_model(words: str, reason: str) -> None:
    """A 503 counted as a model that is not there, and nothing was measured until the spec changed."""
    assert failures.classify_exception(OSError(words)).reason == reason
    assert failures.classify_obstacle(words) == reason
