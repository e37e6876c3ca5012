"""The profile that a run measures is the one that ours serves with: same keys, laid out as a pod mounts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from outrider_crds.profile import (
    DrafterProfile,
    ExecutionMode,
    ProfileKeys,
    ProfilingFailure,
    ProfilingResult,
    StepCost,
    TargetProfile,
)
from outrider_crds.state import ProfileSource
from outrider_runtime.local_manifest import load_local_service
from outrider_runtime.vllm_plugin.profiles import Identity, load_profile

from tests.benchmarks.evidence import profile as module
from tests.benchmarks.evidence import start
from tests.benchmarks.evidence.manifest import base_manifest, with_classes, with_pool, write_manifest
from tests.benchmarks.evidence.profile import ProfileError, check_mounted, profile_once
from tests.benchmarks.evidence.scenario import load_testbed
from tests.benchmarks.evidence.start import table_of

TODAY = "2026-11-21T00:00:00Z"


def keys_of(manifest: Path, models: Path) -> ProfileKeys:
    (keys,) = load_local_service(manifest, models).boot.profile_keys
    return keys


def result_for(keys: ProfileKeys) -> ProfilingResult:
    cost = StepCost(constant_s=0.01, per_batched_token_s=1e-3)
    target = TargetProfile(
        key=keys.target, model="m", product="cpu", costs={ExecutionMode.UNIFORM: cost}, error_percent=3.0,
        measured_at=TODAY,
    )  # fmt: skip
    drafters = [
        DrafterProfile(
            key=key, name=name, cost=StepCost(constant_s=1e-3), autoregressive=name == "eagle", error_percent=3.0,
            measured_at=TODAY,
        )
        for name, key in keys.drafters.items()
    ]  # fmt: skip
    return ProfilingResult(target=target, drafters=drafters)


@pytest.fixture
def manifests(tmp_path: Path) -> tuple[Path, Path, Path]:
    """What is profiled, what ours serves, and where the models are."""
    models = tmp_path / "models"
    for name in ("smollm2-135m-instruct", "smollm2-135m-eagle3"):
        (models / name).mkdir(parents=True)
    base = with_pool(base_manifest(load_testbed()), ["eagle", "lookup"])
    served = with_classes(with_pool(base, ["eagle"]), {"tight": 0.03, "any": 60.0})
    return write_manifest(base, tmp_path / "base.yaml"), write_manifest(served, tmp_path / "served.yaml"), models


def test_ours_serves_with_the_runs_profile(
    manifests: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled, served, models = manifests
    measured: list[Path] = []

    def measure(manifest: Path, file: Path) -> None:
        measured.append(manifest)
        file.write_text(result_for(keys_of(manifest, models)).model_dump_json(by_alias=True))

    monkeypatch.setattr(module, "_measure", measure)
    folder = tmp_path / "profile"
    assert profile_once(profiled, folder) == profile_once(profiled, folder)
    assert measured == [profiled]
    # As the reporter reads it: of its own product.
    keys = keys_of(served, models)
    loaded = load_profile(folder / keys.product, keys, Identity(device="", engine_version="", commit=""))
    assert loaded.state.source is ProfileSource.MOUNTED
    assert loaded.latency is not None
    assert set(loaded.latency.drafters) == {"eagle"}


def test_figures_of_a_loop_without_its_profile_are_refused() -> None:
    """Bug: the profile lay where no pod mounts it, and a whole evening's figures were those of a loop that learns."""
    profile = {"source": "Mounted", "mismatch": "", "loadError": ""}
    check_mounted({"profile": profile})
    check_mounted(None)
    with pytest.raises(ProfileError, match="it found none"):
        check_mounted({"profile": profile | {"source": "Learning"}})
    with pytest.raises(ProfileError, match="other weights"):
        check_mounted({"profile": profile | {"source": "Learning", "mismatch": "other weights"}})


def test_a_table_needs_its_drafters_costs(manifests: tuple[Path, Path, Path]) -> None:
    profiled, _, models = manifests
    result = result_for(keys_of(profiled, models))
    table_system = load_testbed().system("eagle-table")
    assert table_of(result, table_system, most=5)[0][0] == 1
    with pytest.raises(ProfileError, match="'eagle'"):
        table_of(result.model_copy(update={"drafters": []}), table_system, most=5)


def test_a_profile_that_failed_says_why_and_is_measured_again(
    manifests: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = ProfilingResult(failures=[ProfilingFailure(reason="Noisy", message="the machine was not quiet")])
    written: list[Path] = []

    def measure(_manifest: Path, file: Path) -> None:
        written.append(file)
        file.write_text(failed.model_dump_json(by_alias=True))

    monkeypatch.setattr(module, "_measure", measure)
    for _ in range(2):
        with pytest.raises(ProfileError, match="Noisy: the machine was not quiet"):
            profile_once(manifests[0], tmp_path / "profile")
    assert len(written) == 2


@pytest.mark.parametrize(
    ("name", "profiled"),
    [("ours", ["lookup", "eagle"]), ("ours-eagle", ["lookup", "eagle"]), ("ours-draft", ["draft"])],
)
def test_one_profile_serves_the_systems_whose_drafters_it_has(
    name: str, profiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models that draft fit in no pool, so the draft model is profiled on its own."""
    pools: list[list[str]] = []

    def profile(manifest: Path, _folder: Path) -> None:
        pools.append([one["name"] for one in yaml.safe_load(manifest.read_text())["spec"]["draftPool"]])

    monkeypatch.setattr(start, "profile_once", profile)
    monkeypatch.setattr(start, "start_ours", lambda manifest, profiles, *_: (manifest, profiles))
    testbed = load_testbed()
    start.Starter(testbed, tmp_path, pool=("lookup", "eagle")).start(testbed.system(name), {"any": 60.0})
    assert pools == [profiled]
