"""Environment variables of a process that runs this engine. They must be set before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.runtime_config import BootConfig

DEFAULTS = {
    # Torch's threads sleep while they wait for each other. On cores that are shared with other processes, threads that
    # spin take the time of the very threads they wait for: a step then takes ten times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN compiles a program for each number of tokens in a pass. By default torch and oneDNN keep a thousand each:
    # gigabytes that the KV limit does not count. With 64, passes are as fast.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


def engine_environment(boot: BootConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """List the variables to add to `environ`. What the user sets, in the pod or in `engine.env`, wins."""
    user_set = {variable.name: variable.value for variable in boot.engine.env}
    return {name: value for name, value in DEFAULTS.items() if name not in environ} | user_set
