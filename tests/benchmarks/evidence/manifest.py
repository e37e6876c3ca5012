"""From the testbed's manifest to each system's: the same service with another pool, other arguments, other classes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.evidence.prompts import REPOSITORY
from tests.benchmarks.evidence.scenario import FileError, Testbed

Manifest = dict[str, Any]


def base_manifest(testbed: Testbed) -> Manifest:
    """The testbed's, with every drafter of the testbed in the pool. Raises FileError."""
    file = REPOSITORY / testbed.manifest
    try:
        manifest: Manifest = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise FileError(f"{file}: cannot be read: {error}") from error
    spec = manifest["spec"]
    spec["draftPool"] = [*spec["draftPool"], *testbed.more_drafters]
    spec["speculation"]["maxDraftTokens"] = testbed.max_draft_tokens
    spec["engine"]["extraArgs"] = list(testbed.engine_arguments)
    return manifest


def with_pool(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """Raises FileError when a drafter is not there."""
    pool = {drafter["name"]: drafter for drafter in manifest["spec"]["draftPool"]}
    missing = [name for name in names if name not in pool]
    if missing:
        raise FileError(f"drafter {missing[0]!r}: the manifest's pool has {', '.join(pool)}")
    changed = copy.deepcopy(manifest)
    changed["spec"]["draftPool"] = [pool[name] for name in names]
    return changed


def with_classes(manifest: Manifest, tpot_s: Mapping[str, float]) -> Manifest:
    """These SLO classes alone; a request that names none is in the last, the loosest."""
    changed = copy.deepcopy(manifest)
    changed["spec"]["sloClasses"] = [
        {"name": name, "tpot": f"{1e3 * tpot:.2f}ms", "objectivePercent": 90} for name, tpot in tpot_s.items()
    ]
    changed["spec"]["defaultSLOClass"] = list(tpot_s)[-1]
    return changed


def with_chunk(manifest: Manifest, tokens: int) -> Manifest:
    """At most so many tokens in a step."""
    changed = copy.deepcopy(manifest)
    changed["spec"]["engine"]["extraArgs"].append(f"--max-num-batched-tokens={tokens}")
    return changed


def write_manifest(manifest: Manifest, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")
    return file
