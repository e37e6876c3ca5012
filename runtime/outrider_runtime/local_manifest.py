"""Reads a SpeculativeService from a file, without Kubernetes, for `serve -f` and `outrider-profile -f`.

The rules of the API server hold. If a hostPath folder is not on this machine, a folder of the same name is searched in
the model folder (`--model-root`), then in the folder `models` next to the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider_crds.base import seconds
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.manifest import ManifestError, load_manifest
from outrider_crds.model_sources import AdapterVolume, HostPathSource, Lora, ModelRef, ModelSource
from outrider_crds.runtime_config import BootConfig, HotConfig, boot_config, hot_config
from outrider_crds.service import SpeculativeService

DEFAULT_MODEL_ROOT = Path("~/.cache/outrider/models")
LOCAL_REVISION = "local"


class LocalManifestError(Exception):
    """The manifest cannot be served on this machine; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LocalService:
    """Configuration of a service that runs without Kubernetes."""

    boot: BootConfig
    """Boot config, whose hostPath sources are folders of this machine."""
    hot: HotConfig
    drain_timeout_s: float
    """Seconds that running requests may take after a signal, as in a pod."""


def load_local_service(manifest: Path, model_root: Path = DEFAULT_MODEL_ROOT) -> LocalService:
    """Return what to run for `manifest` on this machine. Raises LocalManifestError."""
    return local_service(read_service(manifest), (model_root.expanduser(), manifest.absolute().parent / "models"))


def local_service(service: SpeculativeService, roots: Sequence[Path] = ()) -> LocalService:
    """Return what to run for `service` on this machine. roots: folders to search for hostPath models.

    Raises LocalManifestError.
    """
    spec = service.spec
    boot = boot_config(
        spec,
        service=service.metadata.name,
        namespace=service.metadata.namespace,
        revision=LOCAL_REVISION,
        image="",
        max_draft_tokens=spec.speculation.max_draft_tokens,
    )
    target = _localise(spec.target, "target", roots)
    if target.source.host_path is not None and not _is_there(Path(target.source.host_path.path)):
        raise LocalManifestError(_missing(spec.target, roots))
    pool = [_localised_drafter(drafter, roots) for drafter in boot.draft_pool]
    engine = boot.engine.model_copy(update={"lora": _localised_lora(boot.engine.lora, roots)})
    localised = {"target": target, "draft_pool": pool, "engine": engine}
    return LocalService(
        boot=boot.model_copy(update=localised),
        hot=hot_config(spec),
        drain_timeout_s=seconds(spec.rollout.drain_timeout),
    )


def _localised_lora(lora: Lora | None, roots: Sequence[Path]) -> Lora | None:
    """Return the room for adapters with the local folder. A missing folder is kept: each adapter's reason says so."""
    if lora is None or lora.volume is None:
        return lora
    if lora.volume.oci is not None:
        raise LocalManifestError(
            f"the adapters come from the image {lora.volume.oci.reference!r}, which only Kubernetes mounts; name a "
            "hostPath in engine.lora.volume"
        )
    if lora.volume.pvc is not None:
        raise LocalManifestError(
            f"the adapters come from the claim {lora.volume.pvc.claim_name!r}, and there are no claims without "
            "Kubernetes; name a hostPath in engine.lora.volume"
        )
    assert lora.volume.host_path is not None
    path = Path(lora.volume.host_path.path)
    local = next((folder for folder in _candidates(path, roots) if _is_there(folder)), path)
    return lora.model_copy(update={"volume": AdapterVolume(host_path=HostPathSource(path=str(local)))})


def _localised_drafter(drafter: DrafterSpec, roots: Sequence[Path]) -> DrafterSpec:
    """Return the drafter with its local folder. A missing folder is kept: the engine drops that drafter, with a log."""
    if drafter.neural is None:
        return drafter
    model = _localise(drafter.neural.model, f"drafter {drafter.name!r}", roots)
    block = next(name for name, value in drafter if value is drafter.neural)
    return drafter.model_copy(update={block: drafter.neural.model_copy(update={"model": model})})


def _localise(model: ModelRef, user: str, roots: Sequence[Path]) -> ModelRef:
    if model.source.pvc is not None:
        raise LocalManifestError(
            f"the {user} comes from the claim {model.source.pvc.claim_name!r}, and there are no claims without "
            "Kubernetes; name a hub, s3 or hostPath source"
        )
    if model.source.oci is not None:
        raise LocalManifestError(
            f"the {user} comes from the image {model.source.oci.reference!r}, which only Kubernetes mounts; name a "
            "hub, s3 or hostPath source"
        )
    if model.source.host_path is None:
        return model
    path = Path(model.source.host_path.path)
    local = next((folder for folder in _candidates(path, roots) if _is_there(folder)), path)
    source = ModelSource(host_path=HostPathSource(path=str(local)))
    return model.model_copy(update={"source": source})


def _candidates(path: Path, roots: Sequence[Path]) -> list[Path]:
    return [path, *(root / path.name for root in roots)]


def _is_there(folder: Path) -> bool:
    """Whether the folder exists and this user may read it."""
    try:
        return os.access(folder, os.R_OK | os.X_OK)
    except ValueError:  # the path has a null byte, which no folder's name has
        return False


def _missing(model: ModelRef, roots: Sequence[Path]) -> str:
    assert model.source.host_path is not None
    searched = ", ".join(str(folder) for folder in _candidates(Path(model.source.host_path.path), roots))
    return f"the target {model.name!r} is not on this machine; looked for the folders {searched}; see --model-root"


def read_service(manifest: Path) -> SpeculativeService:
    """Return the service in the file, validated and with defaults. Raises LocalManifestError."""
    try:
        return load_manifest(manifest.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LocalManifestError(f"cannot read {manifest}: {error}") from error
    except ManifestError as error:
        problems = "".join(f"\n  - {problem}" for problem in error.problems)
        raise LocalManifestError(f"{manifest} is not a valid SpeculativeService:{problems}") from error
