"""Worlds that `outrider-profile` measured.

    python -m outrider_runtime.simulate.worlds.profiled RESULT NAME FOLDER     FOLDER/NAME.json from a result

RESULT is what `outrider-profile --result` wrote, the report.json of `--report`, or the operator's ConfigMap
(`kubectl get configmap outrider-profile-... -o yaml`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from outrider_crds.profile import TARGET_FILE, DrafterProfile, ProfileExecutionMode, ProfilingResult
from pydantic import ValidationError

from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.worlds.compose import GRAPH_TOKENS, write
from outrider_runtime.simulate.worlds.world import World, parse_world

UNLIMITED = 1 << 30
DERIVED = (
    "Step times between and beyond the measured shapes: the profile's own fit.",
    "kvTokens: a profile does not say how much KV memory there is; taken to be without end.",
)


def load(path: Path) -> World:
    """Load a result of outrider-profile. Raises SimulationError for any other file."""
    return parse_world(document(path, path.stem))


def document(path: Path, name: str) -> dict[str, Any]:
    """Make a world's document from a result of outrider-profile. Raises SimulationError for any other file."""
    result = _read(path)
    target = result.target
    if target is None:
        raise SimulationError(f"{path} holds no measurement of a target: run outrider-profile for it without --drafter")
    drafters = {profile.name: _drafter(profile) for profile in result.drafters}
    if len(drafters) < len(result.drafters):
        raise SimulationError(f"{path} measures two drafters of one name: {', '.join(sorted(drafters))}")
    return {
        "name": name,
        "origin": "measured",
        "model": target.model,
        "device": target.device or target.product,
        "gpus": 1,
        "source": f"outrider-profile, vLLM {target.engine_version or '?'}, {target.measured_at}: held-out error "
        f"{target.error_percent:.1f}%, spread {target.spread_percent:.1f}%",
        "derived": list(DERIVED),
        "kvTokens": UNLIMITED,
        "graphTokens": GRAPH_TOKENS if ProfileExecutionMode.BEYOND_GRAPH in target.costs else None,
        "target": {"costs": {mode.value: cost.model_dump() for mode, cost in target.costs.items()}},
        "drafters": drafters,
    }


def _drafter(profile: DrafterProfile) -> dict[str, Any]:
    return {
        "passes": profile.autoregressive,
        "cost": profile.cost.model_dump(),
        "firstPass": profile.first_pass.model_dump(),
    }


def _read(path: Path) -> ProfilingResult:
    try:
        parsed_file = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
        return ProfilingResult.model_validate(_result(parsed_file) if isinstance(parsed_file, dict) else parsed_file)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'the document'}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        raise SimulationError(f"{path} is no result of outrider-profile: {problems}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SimulationError(f"cannot read the profile {path}: {' '.join(str(error).split())}") from error


def _result(parsed_file: dict[str, Any]) -> Any:
    """Return the result in a parsed file. Raises ValueError for a ConfigMap with invalid data."""
    if parsed_file.get("kind") == "ConfigMap":
        data = parsed_file.get("data") or {}
        if not isinstance(data, dict) or not all(isinstance(text, str) for text in data.values()):
            raise ValueError("a ConfigMap's data is a mapping of texts; write it with kubectl get configmap -o yaml")
        parts = {name: json.loads(text) for name, text in data.items()}
        return {"target": parts.pop(TARGET_FILE, None), "drafters": [*parts.values()]}
    return parsed_file.get("result", parsed_file)


def main() -> None:
    result, name, folder = sys.argv[1:]
    print(write(document(Path(result), name), Path(folder)))


if __name__ == "__main__":
    main()
