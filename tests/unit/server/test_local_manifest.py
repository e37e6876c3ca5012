"""A manifest on a laptop: where its models are found, and how an edit takes effect."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider_crds.runtime_config import HotConfig, config_hash
from outrider_runtime import file_stamp
from outrider_runtime.local_manifest import LocalManifestError, load_local_service
from outrider_runtime.paths import Paths
from outrider_runtime.server import hot_manifest
from outrider_runtime.server.config import Serving, read_local_manifest
from outrider_runtime.server.hot_manifest import apply_manifest
from outrider_runtime.vllm_plugin.launch import plan_launch, target_location

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The example with its models next to it, in folders of this test."""
    folder = tmp_path / "examples"
    for model in ("smollm2-135m-instruct", "smollm2-135m-eagle3"):
        (folder / "models" / model).mkdir(parents=True)
    copy = folder / "service.yaml"
    copy.write_text((EXAMPLES / "smollm2-cpu.yaml").read_text())
    return copy


def _serving(manifest: Path, tmp_path: Path) -> Serving:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return read_local_manifest(manifest, tmp_path / "root", Paths(run_dir=str(run_dir)))


def _apply(manifest: Path, tmp_path: Path, serving: Serving) -> None:
    apply_manifest(manifest, partial(load_local_service, manifest, tmp_path / "root"), serving)


def _edit(manifest: Path, **speculation: object) -> None:
    document = yaml.safe_load(manifest.read_text())
    document["spec"]["speculation"] |= speculation
    manifest.write_text(yaml.safe_dump(document))


def _hot(serving: Serving) -> HotConfig:
    return HotConfig.model_validate_json(Path(serving.paths.hot_file).read_text())


def test_models_next_to_the_manifest_are_used(manifest: Path, tmp_path: Path) -> None:
    """The EAGLE-3 head of the example is in the repository, next to the example."""
    boot = load_local_service(manifest, tmp_path / "root").boot
    assert boot.target.source.host_path is not None
    assert boot.target.source.host_path.path == str(manifest.parent / "models" / "smollm2-135m-instruct")


def test_model_root_comes_before_the_manifests_folder(manifest: Path, tmp_path: Path) -> None:
    """What the user names wins over what happens to lie there."""
    folder = tmp_path / "root" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    boot = load_local_service(manifest, tmp_path / "root").boot
    assert boot.target.source.host_path is not None
    assert boot.target.source.host_path.path == str(folder)


def test_existing_path_is_used_unchanged(manifest: Path, tmp_path: Path) -> None:
    """The manifest means the same folder on a laptop as on a node."""
    there = tmp_path / "there"
    there.mkdir()
    manifest.write_text(manifest.read_text().replace("/srv/models/smollm2-135m-instruct", str(there)))
    boot = load_local_service(manifest, tmp_path / "root").boot
    assert boot.target.source.host_path is not None
    assert boot.target.source.host_path.path == str(there)


def test_engine_gets_the_folder_and_clients_keep_the_name(manifest: Path, tmp_path: Path) -> None:
    """Clients send the model's name from the manifest, wherever it lies."""
    serving = _serving(manifest, tmp_path)
    plan = plan_launch(serving.boot, serving.hot, serving.paths)
    assert target_location(plan) == str(manifest.parent / "models" / "smollm2-135m-instruct")
    assert plan.boot.target.name == "smollm2-135m-instruct"


def test_missing_draft_is_dropped_and_named(manifest: Path, tmp_path: Path) -> None:
    """A drafter that cannot load is dropped, the server serves on."""
    (manifest.parent / "models" / "smollm2-135m-eagle3").rmdir()
    serving = _serving(manifest, tmp_path)
    plan = plan_launch(serving.boot, serving.hot, serving.paths)
    assert "/srv/models/smollm2-135m-eagle3 has no config.json" in plan.pool.dropped["eagle"]
    assert plan.pool.hosted


def test_edit_of_a_hot_field_takes_effect_without_restart(manifest: Path, tmp_path: Path) -> None:
    """`mode: Off` must not reload a model; on a laptop neither."""
    serving = _serving(manifest, tmp_path)
    before = config_hash(_hot(serving))
    _edit(manifest, mode="Off")
    _apply(manifest, tmp_path, serving)
    assert _hot(serving).mode == "Off"
    assert config_hash(_hot(serving)) != before


def test_drafter_is_paused_without_restart(
    manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """A head that proposes badly is paused at once, without loading the target again."""
    serving = _serving(manifest, tmp_path)
    document = yaml.safe_load(manifest.read_text())
    document["spec"]["draftPool"][0]["paused"] = True
    manifest.write_text(yaml.safe_dump(document))
    with caplog.at_level(logging.WARNING):
        _apply(manifest, tmp_path, serving)
    assert _hot(serving).paused_drafters == [document["spec"]["draftPool"][0]["name"]]
    assert "restart" not in caplog.text


def _with_lora(manifest: Path, volume: dict[str, Any], *adapters: str) -> None:
    document = yaml.safe_load(manifest.read_text())
    document["spec"]["engine"]["lora"] = {"volume": volume}
    document["spec"]["adapters"] = [{"name": name, "source": {"folder": {"path": name}}} for name in adapters]
    manifest.write_text(yaml.safe_dump(document))


def test_adapters_change_without_restart(manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their folder is found as models are: by its last name, next to the manifest."""
    folder, volume = manifest.parent / "models" / "adapters", {"hostPath": {"path": "/srv/models/adapters"}}
    folder.mkdir()
    _with_lora(manifest, volume, "support")
    serving = _serving(manifest, tmp_path)
    lora = serving.boot.engine.lora
    assert lora is not None
    assert lora.volume is not None
    assert lora.volume.host_path is not None
    assert lora.volume.host_path.path == str(folder)
    _with_lora(manifest, volume, "support", "legal")
    with caplog.at_level(logging.WARNING):
        _apply(manifest, tmp_path, serving)
    assert [adapter.name for adapter in _hot(serving).adapters or ()] == ["support", "legal"]
    assert "restart" not in caplog.text


def test_adapters_from_a_claim_are_refused_on_a_laptop(manifest: Path, tmp_path: Path) -> None:
    _with_lora(manifest, {"pvc": {"claimName": "adapters", "path": "llama"}})
    with pytest.raises(LocalManifestError, match="adapters come from the claim 'adapters'"):
        load_local_service(manifest, tmp_path / "root")


def test_broken_edit_changes_nothing(manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An editor saves half a file sooner or later."""
    serving = _serving(manifest, tmp_path)
    before = _hot(serving)
    _edit(manifest, mode="Sometimes")
    with caplog.at_level(logging.ERROR):
        _apply(manifest, tmp_path, serving)
    assert _hot(serving) == before
    assert "the changed manifest is not used" in caplog.text


def test_edit_that_needs_a_restart_is_logged(manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lowering the draft length is hot; raising it above the value at the start is not."""
    serving = _serving(manifest, tmp_path)
    with caplog.at_level(logging.WARNING):
        _edit(manifest, maxDraftTokens=2)
        _apply(manifest, tmp_path, serving)
        assert "after a restart" not in caplog.text
        _edit(manifest, maxDraftTokens=9)
        _apply(manifest, tmp_path, serving)
        assert "after a restart" in caplog.text


def test_new_order_of_the_pool_takes_effect_without_restart(
    manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mode Static asks the first drafter: the new order is written where the engine reads it."""
    serving = _serving(manifest, tmp_path)
    document = yaml.safe_load(manifest.read_text())
    document["spec"]["draftPool"].reverse()
    manifest.write_text(yaml.safe_dump(document))
    with caplog.at_level(logging.WARNING):
        _apply(manifest, tmp_path, serving)
    assert "after a restart" not in caplog.text
    assert _hot(serving).drafter_order == [drafter["name"] for drafter in document["spec"]["draftPool"]]


def test_reverted_edit_restores_the_config_of_the_start(manifest: Path, tmp_path: Path) -> None:
    """Bug: the order of the pool stood in the config after any edit, so that its hash never came back."""
    serving, text = _serving(manifest, tmp_path), manifest.read_text()
    before = _hot(serving)
    _edit(manifest, maxDraftTokens=2)
    _apply(manifest, tmp_path, serving)
    manifest.write_text(text)
    _apply(manifest, tmp_path, serving)
    assert _hot(serving) == before


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml") if "patch" not in path.name))
def test_every_example_is_a_valid_manifest(name: str) -> None:
    """A user can apply them as they are."""
    from outrider_crds.manifest import load_manifest

    assert load_manifest((EXAMPLES / name).read_text()).metadata.name


# What each patch of an example is applied to: a service, and the patches before it.
PATCHED = {
    "smollm2-block-draft-patch.yaml": ("smollm2-cpu.yaml",),
    "smollm2-second-draft-patch.yaml": ("smollm2-cpu.yaml",),
    "smollm2-better-draft-patch.yaml": ("smollm2-canary.yaml",),
    "smollm2-worse-draft-patch.yaml": ("smollm2-canary.yaml", "smollm2-better-draft-patch.yaml"),
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*-patch.yaml")))
def test_every_patch_of_an_example_is_valid(name: str) -> None:
    """`kubectl patch --type=json --patch-file`: each changes one drafter, and keeps what others have added."""
    from outrider_crds.manifest import load_manifest

    base, *earlier = PATCHED[name]
    document = yaml.safe_load((EXAMPLES / base).read_text())
    for patch in earlier:
        _patch_pool(document, patch)
    before = load_manifest(yaml.safe_dump(document)).spec
    _patch_pool(document, name)
    after = load_manifest(yaml.safe_dump(document)).spec
    assert [drafter for drafter in after.draft_pool if drafter not in before.draft_pool] == after.draft_pool[-1:]
    assert after.target == before.target


def _patch_pool(document: dict[str, Any], name: str) -> None:
    """Applies the patch file `name`, which adds one drafter at the end of the pool or replaces one."""
    (change,) = yaml.safe_load((EXAMPLES / name).read_text())
    pool, place = document["spec"]["draftPool"], change["path"].removeprefix("/spec/draftPool/")
    if change["op"] == "add" and place == "-":
        pool.append(change["value"])
    else:
        assert change["op"] == "replace"
        pool[int(place)] = change["value"]


def test_path_with_a_null_byte_is_reported_as_missing(manifest: Path, tmp_path: Path) -> None:
    manifest.write_text(manifest.read_text().replace("/srv/models/smollm2-135m-instruct", '"/srv/\\0x"'))
    with pytest.raises(LocalManifestError, match=r"not on this machine|hostPath"):
        load_local_service(manifest, tmp_path / "root")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # so the thread ends
def test_watcher_survives_recursion_error_in_manifest(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an anchor within itself ended the thread that follows the manifest, and no later edit was read."""
    serving = _serving(manifest, tmp_path)
    edits, over, before = threading.Semaphore(0), threading.Event(), {*threading.enumerate()}

    def stumble(*_arguments: object) -> None:
        edits.release()
        raise SystemExit if over.is_set() else RecursionError

    monkeypatch.setattr(hot_manifest, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(hot_manifest, "apply_manifest", stumble)
    hot_manifest.follow_manifest(manifest, partial(load_local_service, manifest, tmp_path / "root"), serving)
    for _ in range(2):
        while not edits.acquire(timeout=0.05):
            manifest.write_text(manifest.read_text() + "\n")
    over.set()  # else the thread would go on, in a folder that is deleted
    (thread,) = {*threading.enumerate()} - before
    while thread.is_alive():
        manifest.write_text(manifest.read_text() + "\n")
        thread.join(0.05)


def test_edit_that_was_read_half_done_is_read_again(manifest: Path) -> None:
    """Bug: a file that was read while an editor had emptied it has the same time afterwards, within the tick of the
    file system's clock: the edit was lost."""
    whole, stamps = manifest.read_text(), list[object]()
    for text in ("", whole):
        manifest.write_text(text)
        os.utime(manifest, ns=(0, 0))
        stamps.append(file_stamp.stamp(manifest))
    assert stamps[0] != stamps[1]
