"""Reads the mounted latency profile, and refuses one that was measured for something else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider_crds import profile as api
from outrider_crds.contract import Contract
from outrider_crds.profile import TARGET_FILE, DrafterProfile, TargetProfile
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import PRODUCT_ANNOTATION
from outrider_crds.runtime_state import ProfileSource, ProfileState
from pydantic import ValidationError

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, StepCost
from outrider_runtime.error_text import first_line

ANNOTATIONS_FILE = "annotations"
Document = TypeVar("Document", bound=Contract)


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """Device, engine version and weights of this pod; a profile names those that it was measured with."""

    device: str
    engine_version: str
    commit: str


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    state: ProfileState
    latency: LatencyModel | None
    """None: step times are learned online."""


class UnreadableProfileError(ValueError):
    """A profile file is there but cannot be read; the message names it."""


def load_profile(directory: Path, keys: ProfileKeys | None, identity: PodIdentity) -> LoadedProfile:
    """Load the profile of `keys` from `directory`. On UnreadableProfileError the caller keeps the profile it has."""
    target = None if keys is None else _read(directory / TARGET_FILE, TargetProfile)
    if keys is None or target is None:
        return LoadedProfile(ProfileState(target_key=keys.target if keys else ""), None)
    refusal = _refusal(target, keys, identity)
    if refusal:
        return LoadedProfile(ProfileState(target_key=keys.target, mismatch=refusal), None)
    read = {name: _read(directory / f"{key}.json", DrafterProfile) for name, key in keys.drafters.items()}
    drafters = {name: profile for name, profile in read.items() if profile and profile.key == keys.drafters[name]}
    foreign = [
        f"the mounted profile of drafter {name!r} was measured for {profile.key}, this pod needs "
        f"{keys.drafters[name]}; learning its cost online"
        for name, profile in read.items()
        if profile and name not in drafters
    ]
    state = ProfileState(
        source=ProfileSource.MOUNTED,
        target_key=keys.target,
        error_percent=target.error_percent,
        mismatch="; ".join(filter(None, [_difference("weights", target.commit, identity.commit), *foreign])),
    )
    return LoadedProfile(state, _latency(target, drafters))


def _refusal(target: TargetProfile, keys: ProfileKeys, identity: PodIdentity) -> str:
    if target.key != keys.target:
        return f"the mounted profile was measured for {target.key}, this pod needs {keys.target}; learning online"
    difference = _difference("device", target.device, identity.device)
    difference = difference or _difference("engine version", target.engine_version, identity.engine_version)
    return f"{difference}; learning online" if difference else ""


def _difference(what: str, measured: str, ours: str) -> str:
    """Name the difference; empty if both are equal, or one is unknown."""
    if not measured or not ours or measured == ours:
        return ""
    return f"the profile was measured with {what} {measured!r}, this pod has {ours!r}"


def _read(path: Path, kind: type[Document]) -> Document | None:
    """Read a profile file; None if it is missing (it is mounted once it exists)."""
    try:
        return kind.read(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise UnreadableProfileError(f"profile file {path.name} cannot be read: {first_line(error)}") from error


def _latency(target: TargetProfile, drafters: dict[str, DrafterProfile]) -> LatencyModel:
    return LatencyModel(
        target={ExecutionMode(mode.value): _cost(cost) for mode, cost in target.costs.items()},
        drafters={
            name: DrafterCost(_cost(profile.cost), profile.autoregressive, _cost(profile.first_pass))
            for name, profile in drafters.items()
        },
    )


def _cost(cost: api.ProfileStepCost) -> StepCost:
    return StepCost(**{name: getattr(cost, name) for name in api.ProfileStepCost.model_fields})


def product_of_pod(podinfo_dir: Path, products: list[str]) -> str:
    """Return the accelerator product of the pod's node: the only one, or the one that the operator annotated, or ""."""
    if len(products) == 1:
        return products[0]
    try:
        lines = (podinfo_dir / ANNOTATIONS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:  # the kubelet writes key="value", quoted as Go does
        key, separator, value = line.partition("=")
        if separator and key == PRODUCT_ANNOTATION:
            return value.strip().strip('"')
    return ""
