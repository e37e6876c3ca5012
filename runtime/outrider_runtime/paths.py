"""Paths of what Kubernetes mounts, and of the folder through which the runtime's processes exchange files."""

from __future__ import annotations

from outrider_crds.base import Model
from outrider_crds.runtime_config import HOT_FILE, PODINFO_DIR, PROFILES_DIR

from outrider_runtime.drafters.pool import ModelPlaces

RUN_DIR_VARIABLE = "OUTRIDER_RUN_DIR"


class Paths(Model):
    """Paths of one runtime."""

    hot_file: str = HOT_FILE
    profiles_dir: str = PROFILES_DIR
    podinfo_dir: str = PODINFO_DIR
    run_dir: str = ""
    """Folder of this process and its children, in memory (tmpfs) if possible."""
    mounted: bool = True
    """True in a pod, where hostPath models are mounted; False if they are read from their original path."""

    @property
    def models(self) -> ModelPlaces:
        return ModelPlaces(mounted=self.mounted)
