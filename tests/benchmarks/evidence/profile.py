"""The latency profile of a run: measured once by `outrider-profile`, mounted for ours, and the table's source."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider_crds.profile import TARGET_FILE, ProfilingResult
from outrider_crds.state import ProfileSource

from tests.benchmarks.evidence.prompts import REPOSITORY
from tests.benchmarks.evidence.server import MODEL_ROOT

TIME_BUDGET = "240s"
RESULT = "result.json"


class ProfileError(RuntimeError):
    """There is no profile; the message says why."""


def profile_once(manifest: Path, folder: Path) -> ProfilingResult:
    """The profile in `folder`; measured when it is not there. Laid out as a pod mounts it: a folder for each product.

    Raises ProfileError.
    """
    file = folder / RESULT
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _measure(manifest, file)
    result = ProfilingResult.model_validate_json(file.read_bytes())
    if result.target is None:
        file.unlink()
        reasons = "; ".join(f"{failure.reason}: {failure.message}" for failure in result.failures)
        raise ProfileError(f"the target could not be profiled: {reasons}; see {folder}")
    mounted = folder / result.target.product
    mounted.mkdir(exist_ok=True)
    (mounted / TARGET_FILE).write_text(result.target.model_dump_json(by_alias=True))
    for drafter in result.drafters:
        (mounted / f"{drafter.key}.json").write_text(drafter.model_dump_json(by_alias=True))
    return result


def check_mounted(state: Mapping[str, Any] | None) -> None:
    """Raises ProfileError where the runtime of this state (None: it is not ours) serves without its profile: its
    figures would be those of another loop."""
    if state is None or state["profile"]["source"] == ProfileSource.MOUNTED:
        return
    why = state["profile"]["mismatch"] or state["profile"]["loadError"] or "it found none"
    raise ProfileError(f"ours serves without the profile that was measured for it: {why}")


def _measure(manifest: Path, file: Path) -> None:
    part = file.with_suffix(".part")
    command = [
        sys.executable, "-m", "outrider_runtime.profiler.main", "-f", str(manifest), "--time-budget", TIME_BUDGET,
        "--model-root", str(MODEL_ROOT), "--result", str(part), "--report", str(file.parent),
    ]  # fmt: skip
    with file.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, cwd=REPOSITORY)
    if done.returncode != 0 or not part.is_file():
        raise ProfileError(f"outrider-profile ended with {done.returncode}; see {log.name}")
    part.rename(file)
