"""Finds a profile: one that ships with the simulator, a file of the same form, or a result of outrider-profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from outrider_crds.profile import DrafterProfile as MeasuredDrafter
from outrider_crds.profile import ProfilingResult, TargetProfile
from outrider_crds.spec import DraftMethod
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outrider_runtime.simulate import data
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.profile_document import DrafterProfile, Label, SimulationProfile

FOLDER = data.FOLDER / "profiles"


def known() -> list[SimulationProfile]:
    """Those that ship, by name."""
    return [_parsed(path, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.yaml"))]


def load(name_or_file: str) -> SimulationProfile:
    """Raises SimulationError for an unknown name, with those that are known, and for a file that is no profile."""
    path = Path(name_or_file)
    if path.is_file():
        return _parsed(path, _document(path))
    for profile in known():
        if profile.name == name_or_file:
            return profile
    names = "".join(f"\n  - {profile.name} ({profile.label})" for profile in known())
    raise SimulationError(
        f"--profile {name_or_file}: no such file, and no shipped profile of this name; known are{names}"
    )


def _document(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SimulationError(f"cannot read the profile {path}: {' '.join(str(error).split())}") from error


def _parsed(path: Path, document: Any) -> SimulationProfile:
    try:
        if isinstance(document, dict) and "label" not in document:
            # outrider-profile --result FILE, or report.json of --report
            return _measured_file(path, ProfilingResult.model_validate(document.get("result", document)))
        return SimulationProfile.model_validate(document)
    except ValidationError as error:
        problems = "".join(f"\n  - {_sentence(problem)}" for problem in error.errors(include_url=False))
        raise SimulationError(f"{path} is no latency profile:{problems}") from error


def _sentence(problem: ErrorDetails) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place or 'the document'}: {problem['msg']}"


def _measured_file(path: Path, result: ProfilingResult) -> SimulationProfile:
    if result.target is None:
        raise SimulationError(f"{path} holds no measurement of a target: run outrider-profile for it without --drafter")
    return measured(path.stem, result.target, result.drafters)


def measured(name: str, target: TargetProfile, drafters: Sequence[MeasuredDrafter]) -> SimulationProfile:
    """What outrider-profile measured. It does not say how much KV memory there is."""
    return SimulationProfile(
        name=name,
        label=Label.MEASURED,
        source=f"outrider-profile, {target.measured_at}: held-out error {target.error_percent:.1f}%, "
        f"spread {target.spread_percent:.1f}%",
        device=target.device or target.product,
        target=target.model,
        costs=target.costs,
        drafters=[_measured_drafter(drafter) for drafter in drafters],
    )


def _measured_drafter(drafter: MeasuredDrafter) -> DrafterProfile:
    """The result names the drafter, not its method; the name is what the manifest is matched by."""
    method = DraftMethod.DRAFT_MODEL if drafter.autoregressive else DraftMethod.PROMPT_LOOKUP
    return DrafterProfile(
        method=method, name=drafter.name, model=drafter.name, cost=drafter.cost, autoregressive=drafter.autoregressive,
        first_pass=drafter.first_pass,
    )  # fmt: skip
