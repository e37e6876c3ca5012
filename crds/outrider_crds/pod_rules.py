"""Rules for podTemplate's volumes and mounts: they must not replace Outrider's. Kubernetes validates the rest."""

from __future__ import annotations

from outrider_crds.base import Model
from outrider_crds.pod_template import PodTemplate, Volume, VolumeMount
from outrider_crds.rule import Rule, cel_list

OUR_VOLUMES = "outrider-"
OUR_FOLDERS = ("/etc/outrider", "/var/lib/outrider", "/var/cache/outrider", "/var/cache/compile", "/run/outrider")
SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
SCRATCH_FOLDERS = ("/home/outrider", "/tmp")
"""Outrider's folders in which users may mount volumes."""


def _stays_inside(on: type[Model], field: str, attribute: str) -> Rule:
    """Rule for a path without "." and names that begin with "..", which Kubernetes reserves."""
    return Rule(
        on=on,
        field=f".{field}",
        cel=f"!has(self.{field}) || !self.{field}.split('/').exists(part, part == '.' || part.startsWith('..'))",
        holds=lambda m: not any(_is_odd(part) for part in (getattr(m, attribute) or "").split("/")),
        message=f"{field} must not contain '.', '..' or a name that begins with '..': write the path without it",
    )


def _is_odd(part: str) -> bool:
    return part == "." or part.startswith("..")


def _reserved_mount(path: str) -> bool:
    """Is `path` one of Outrider's folders, above one, or inside one that is not scratch space?"""
    closed = (*OUR_FOLDERS, *SYSTEM_FOLDERS)
    above = any(ours == path or ours.startswith(f"{path}/") for ours in (*closed, *SCRATCH_FOLDERS))
    return above or any(path.startswith(f"{ours}/") for ours in closed)


_CLOSED = cel_list((*OUR_FOLDERS, *SYSTEM_FOLDERS))
_ALL_OURS = cel_list((*OUR_FOLDERS, *SYSTEM_FOLDERS, *SCRATCH_FOLDERS))


def _host_mounts_read_only(template: PodTemplate) -> bool:
    hosts = {volume.name for volume in template.volumes if volume.host_path is not None}
    return all(mount.read_only for mount in template.volume_mounts if mount.name in hosts)


POD_RULES = (
    Rule(
        on=Volume,
        field=".name",
        cel=f"!self.name.startsWith('{OUR_VOLUMES}')",
        holds=lambda v: not v.name.startswith(OUR_VOLUMES),
        message=f"volumes whose name begins with {OUR_VOLUMES} are Outrider's: choose another name",
    ),
    _stays_inside(VolumeMount, "mountPath", "mount_path"),
    Rule(
        on=VolumeMount,
        field=".mountPath",
        cel=(
            f"!{_ALL_OURS}.exists(f, f == self.mountPath || f.startsWith(self.mountPath + '/')) "
            f"&& !{_CLOSED}.exists(f, self.mountPath.startsWith(f + '/'))"
        ),
        holds=lambda m: not _reserved_mount(m.mount_path),
        message=(
            f"mountPath must leave {', '.join((*OUR_FOLDERS, *SYSTEM_FOLDERS))} alone, and may lie in "
            f"{' and '.join(SCRATCH_FOLDERS)} but not replace them: choose another path"
        ),
    ),
    Rule(
        on=PodTemplate,
        field=".volumeMounts",
        cel=(
            "!has(self.volumeMounts) || !has(self.volumes) || self.volumeMounts.all(m, "
            "(has(m.readOnly) && m.readOnly) || !self.volumes.exists(v, v.name == m.name && has(v.hostPath)))"
        ),
        holds=_host_mounts_read_only,
        message="hostPath volumes are mounted for reading only: add readOnly: true to the mount",
    ),
)
