"""The engine core's reporter: the state crosses processes whole, changed files take effect, broken ones do not."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.profile import DrafterProfile, ProfileExecutionMode, ProfileStepCost, TargetProfile
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import HotConfig, config_hash
from outrider_crds.runtime_state import ProfileSource, RuntimeState
from outrider_crds.spec import SpeculationMode
from outrider_runtime.control import step_times as control
from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.drafter_availability import FIRST_SUSPENSION_S
from outrider_runtime.loop.mounted_profile import PodIdentity, load_profile, product_of_pod
from outrider_runtime.loop.reporter import Reporter
from outrider_runtime.paths import Paths
from outrider_runtime.snapshot import blank_state, read_snapshot, write_snapshot
from outrider_runtime.vllm_plugin import launch

from tests.engine.engines import boot_config, draft_model, hot_config, lookup
from tests.unit.control import columns

KEYS = ProfileKeys(product="cpu", target="7e1", drafters={"pld": "d1"})
POD = PodIdentity(device="EPYC", engine_version="0.32.0", commit="abc")
PROFILE = TargetProfile(
    key="7e1", model="m", product="cpu", device="EPYC", engine_version="0.32.0", commit="abc",
    costs={ProfileExecutionMode.UNIFORM: ProfileStepCost(constant_s=0.02)}, error_percent=4.0,
    measured_at="2026-01-01T00:00:00Z",
)  # fmt: skip
DRAFTER = DrafterProfile(
    key="d1", name="pld", cost=ProfileStepCost(constant_s=0.001), autoregressive=False, error_percent=5.0,
    measured_at="2026-01-01T00:00:00Z",
)  # fmt: skip


class Pod:
    """One pod's mounted files, its loop and its reporter."""

    def __init__(self, folder: Path) -> None:
        broken = draft_model(folder / "nowhere")
        boot = boot_config([lookup(), broken]).model_copy(update={"profile_keys": [KEYS]})
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.hot_file = folder / "hot.json"
        self.profiles = folder / "profiles" / "cpu"
        self.profiles.mkdir(parents=True)
        paths = Paths(hot_file=str(self.hot_file), profiles_dir=str(self.profiles.parent), run_dir=str(self.run_dir))
        pool = HostedPool(hosted=(lookup(),), dropped={"draft": "model folder has no config.json"})
        plan = launch.LaunchPlan(boot=boot, hot=hot_config(), paths=paths, pool=pool, engine_version="0.32.0")
        self.plan = plan
        self.loop = self.control_loop()
        self.reporter = Reporter(self.loop, paths, plan.hot, POD, started_at=1.0)

    def control_loop(self, **settings: Any) -> ControlLoop:
        plan = self.plan
        return ControlLoop(
            plan.boot, plan.hot, plan.pool.hosted, max_requests=4, left_out=plan.pool.dropped, **settings
        )  # fmt: skip

    def write_hot(self, hot: HotConfig) -> None:
        self.hot_file.write_text(json.dumps(hot.wire()))

    def tick(self) -> RuntimeState:
        self.reporter.tick()
        state = read_snapshot(self.run_dir)
        assert state is not None
        return state


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_changed_hot_config_is_in_force_and_its_hash_echoed(pod: Pod) -> None:
    """Promise: `mode: Off` takes effect without a restart, and CI can wait for it."""
    assert pod.tick().config_hash == config_hash(hot_config())
    off = hot_config(SpeculationMode.OFF)
    pod.write_hot(off)
    state = pod.tick()
    assert state.config_hash == config_hash(off)
    assert state.choice.reason == "Off"


def test_a_broken_hot_config_leaves_the_old_one_in_force(pod: Pod) -> None:
    off = hot_config(SpeculationMode.OFF)
    pod.write_hot(off)
    pod.tick()
    pod.hot_file.write_text('{"mode": "Sometimes"')
    state = pod.tick()
    assert state.config_hash == config_hash(off)
    assert "stays in force" in state.config_error
    pod.write_hot(off)
    assert pod.tick().config_error == ""


def test_a_configmap_that_swaps_its_symlink_is_noticed(pod: Pod, tmp_path: Path) -> None:
    """Bug: the path's own inode stays the same when the kubelet swaps ..data."""
    for name, mode in (("one", SpeculationMode.OFF), ("two", SpeculationMode.STATIC)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hot.json").write_text(json.dumps(hot_config(mode).wire()))
    data = tmp_path / "..data"
    data.symlink_to("one")
    pod.hot_file.symlink_to("..data/hot.json")
    assert pod.tick().config_hash == config_hash(hot_config(SpeculationMode.OFF))
    (tmp_path / "..data_tmp").symlink_to("two")
    (tmp_path / "..data_tmp").rename(data)
    assert pod.tick().config_hash == config_hash(hot_config(SpeculationMode.STATIC))


def test_a_mounted_profile_is_used_and_a_later_one_replaces_it(pod: Pod) -> None:
    assert pod.tick().profile.source is ProfileSource.LEARNING
    (pod.profiles / "target.json").write_text(PROFILE.model_dump_json(by_alias=True))
    (pod.profiles / "d1.json").write_text(DRAFTER.model_dump_json(by_alias=True))
    state = pod.tick()
    assert state.profile.source is ProfileSource.MOUNTED
    assert state.profile.error_percent == 4.0
    assert not pod.loop.state().learning


def test_a_corrupt_profile_keeps_the_one_before_and_says_so(pod: Pod) -> None:
    file = pod.profiles / "target.json"
    file.write_text(PROFILE.model_dump_json(by_alias=True))
    pod.tick()
    file.write_text('{"key": "7e1", "costs": "NaN"}')
    state = pod.tick()
    assert "target.json" in state.profile.load_error
    assert state.profile.source is ProfileSource.MOUNTED
    assert not pod.loop.state().learning


@pytest.mark.parametrize(
    ("update", "said"),
    [({"key": "t2"}, "t2"), ({"device": "H200"}, "H200"), ({"engine_version": "0.31.0"}, "0.31.0")],
)
def test_a_profile_of_something_else_is_refused_and_said(pod: Pod, update: dict[str, str], said: str) -> None:
    """Promise: refused, learned online instead, and said."""
    (pod.profiles / "target.json").write_text(PROFILE.model_copy(update=update).model_dump_json(by_alias=True))
    state = pod.tick()
    assert said in state.profile.mismatch
    assert state.profile.source is ProfileSource.LEARNING
    assert pod.loop.state().learning


def test_foreign_drafter_profile_is_refused_with_reason(pod: Pod) -> None:
    """The target's profile stays in use; the drafter's cost is learned."""
    (pod.profiles / "target.json").write_text(PROFILE.model_dump_json(by_alias=True))
    (pod.profiles / "d1.json").write_text(DRAFTER.model_copy(update={"key": "d2"}).model_dump_json(by_alias=True))
    state = pod.tick()
    assert "d2" in state.profile.mismatch
    assert state.profile.source is ProfileSource.MOUNTED
    loaded = load_profile(pod.profiles, KEYS, POD)
    assert loaded.latency is not None
    assert "pld" not in loaded.latency.drafters


def test_profile_of_an_older_release_without_first_pass_is_used(pod: Pod) -> None:
    """Profiles outlive the operator that stored them: the field is absent, and costs nothing."""
    wire = DRAFTER.model_dump(mode="json", by_alias=True)
    del wire["firstPass"]
    (pod.profiles / "target.json").write_text(PROFILE.model_dump_json(by_alias=True))
    (pod.profiles / "d1.json").write_text(json.dumps(wire))
    loaded = load_profile(pod.profiles, KEYS, POD)
    assert loaded.latency is not None
    assert loaded.latency.drafters["pld"].first_pass == control.StepCost()


def test_other_weights_of_the_same_shape_are_used_but_said(pod: Pod) -> None:
    other = PROFILE.model_copy(update={"commit": "def"})
    (pod.profiles / "target.json").write_text(other.model_dump_json(by_alias=True))
    state = pod.tick()
    assert "def" in state.profile.mismatch
    assert state.profile.source is ProfileSource.MOUNTED


def test_the_product_is_the_one_that_the_operator_annotated(tmp_path: Path) -> None:
    """Promise: a service of several products learns until its pod's node is known; then its profile is read."""
    products = ["NVIDIA-H100", "NVIDIA-H200"]
    assert product_of_pod(tmp_path, ["cpu"]) == "cpu"
    assert product_of_pod(tmp_path, products) == "", "no downward-API file yet"
    annotations = tmp_path / "annotations"
    annotations.write_text('kubernetes.io/config.source="api"\n')
    assert product_of_pod(tmp_path, products) == ""
    annotations.write_text('kubernetes.io/config.source="api"\noutrider.dev/product="NVIDIA-H200"\n')
    assert product_of_pod(tmp_path, products) == "NVIDIA-H200"


def test_a_drafter_that_was_dropped_is_named_with_its_reason(pod: Pod) -> None:
    """Promise: the pod serves on and names it in status.drafts."""
    drafters = {drafter.name: drafter for drafter in pod.tick().drafters}
    assert drafters["pld"].loaded
    assert not drafters["draft"].loaded
    assert drafters["draft"].reason == "model folder has no config.json"


def test_failing_drafter_is_suspended_with_error_in_the_state(pod: Pod) -> None:
    pod.loop.drafter_failed("pld", "RuntimeError: no tokens today")
    drafter = pod.tick().drafters[0]
    assert drafter.loaded
    assert "no tokens today" in drafter.reason
    assert "30 s" in drafter.reason


def test_suspended_drafter_returns_after_longer_pauses_each_time(pod: Pod) -> None:
    """Promise: switched off for a while. A step that was under way does not count as another failure."""
    clock_s = [100.0]
    loop = pod.control_loop(clock=lambda: clock_s[0])
    idle = columns.batch(1)
    for pause_s in (FIRST_SUSPENSION_S, 2 * FIRST_SUSPENSION_S, 4 * FIRST_SUSPENSION_S):
        loop.drafter_failed("pld", "it raised")
        loop.drafter_failed("pld", "it raised in a step that was under way")
        assert f"{pause_s:.0f} s: it raised" in loop.state().drafters["pld"].suspended
        clock_s[0] += pause_s - 1
        loop.plan_draft(idle)
        assert loop.state().drafters["pld"].suspended
        clock_s[0] += 2
        loop.plan_draft(idle)
        assert loop.state().drafters["pld"].suspended == ""


def test_readers_see_whole_states_while_one_is_written(tmp_path: Path) -> None:
    """Bug: a reader between truncate and write sees half a document."""
    boot, stop = boot_config([lookup()]), threading.Event()
    state = blank_state(boot, hot_config(), started_at=1.0)

    def write() -> None:
        steps = 0
        while not stop.is_set():
            steps += 1
            write_snapshot(tmp_path, state.model_copy(update={"steps": steps, "device": "x" * (steps % 5000)}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while read_snapshot(tmp_path) is None:
            pass
        for _ in range(300):
            assert read_snapshot(tmp_path) is not None
    finally:
        stop.set()
        writer.join()
