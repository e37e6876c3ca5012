"""Environment of a process that runs the engine; it acts where it is set before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.runtime_config import BootConfig

DEFAULTS = {
    # Threads sleep while they wait for each other. Spinning on cores that others use as well, they keep those waiting
    # whom they wait for: a step then takes ten times as long, and as much more of the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN makes a program for each number of tokens in a pass, and torch and it keep a thousand each: gigabytes that
    # no limit of the KV memory knows of. With a few, passes take as long.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


def engine_environment(boot: BootConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to `environ`; what the user set, in the pod or in `engine.env`, wins."""
    chosen = {variable.name: variable.value for variable in boot.engine.env}
    return {name: value for name, value in DEFAULTS.items() if name not in environ} | chosen
