"""Where the runtime finds what Kubernetes mounts, and where its own processes meet."""

from __future__ import annotations

from outrider_crds.base import Model
from outrider_crds.runtime_config import HOT_FILE, PODINFO_DIR, PROFILES_DIR

from outrider_runtime.drafters.pool import ModelPlaces

RUN_DIR_VARIABLE = "OUTRIDER_RUN_DIR"


class Paths(Model):
    hot_file: str = HOT_FILE
    profiles_dir: str = PROFILES_DIR
    podinfo_dir: str = PODINFO_DIR
    run_dir: str = ""
    """A folder of this process's own, on tmpfs where there is one."""
    mounted: bool = True
    """True in a pod, where models of hostPath sources are mounted; False where they are read in their own place."""

    @property
    def models(self) -> ModelPlaces:
        return ModelPlaces(mounted=self.mounted)
