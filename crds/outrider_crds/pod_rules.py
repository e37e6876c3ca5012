"""Rules for podTemplate's volumes and mounts: they must not replace Outrider's. Kubernetes validates the rest."""

from __future__ import annotations

from outrider_crds.pod_template import PodTemplate, Volume, VolumeMount
from outrider_crds.rule import Rule, cel_list, rules_on

OUR_VOLUMES = "outrider-"
OUR_FOLDERS = ("/etc/outrider", "/var/lib/outrider", "/var/cache/outrider", "/var/cache/compile", "/run/outrider")
SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
SCRATCH_FOLDERS = ("/home/outrider", "/tmp")
"""Outrider's folders in which users may mount volumes."""


_CLOSED = cel_list((*OUR_FOLDERS, *SYSTEM_FOLDERS))
_ALL_OURS = cel_list((*OUR_FOLDERS, *SYSTEM_FOLDERS, *SCRATCH_FOLDERS))

POD_RULES: tuple[Rule, ...] = (
    *rules_on(
        Volume,
        (
            ".name",
            f"!self.name.startsWith('{OUR_VOLUMES}')",
            f"volumes whose name begins with {OUR_VOLUMES} are Outrider's: choose another name",
        ),
    ),
    *rules_on(
        VolumeMount,
        (  # names that begin with ".." are reserved by Kubernetes
            ".mountPath",
            "!self.mountPath.split('/').exists(part, part == '.' || part.startsWith('..'))",
            "mountPath must not contain '.', '..' or a name that begins with '..': write the path without it",
        ),
        (
            ".mountPath",
            f"!{_ALL_OURS}.exists(f, f == self.mountPath || f.startsWith(self.mountPath + '/')) "
            f"&& !{_CLOSED}.exists(f, self.mountPath.startsWith(f + '/'))",
            f"mountPath must leave {', '.join((*OUR_FOLDERS, *SYSTEM_FOLDERS))} alone, and may lie in "
            f"{' and '.join(SCRATCH_FOLDERS)} but not replace them: choose another path",
        ),
    ),
    *rules_on(
        PodTemplate,
        (
            ".volumeMounts",
            "!has(self.volumeMounts) || !has(self.volumes) || self.volumeMounts.all(m, "
            "(has(m.readOnly) && m.readOnly) || !self.volumes.exists(v, v.name == m.name && has(v.hostPath)))",
            "hostPath volumes are mounted for reading only: add readOnly: true to the mount",
        ),
    ),
)
