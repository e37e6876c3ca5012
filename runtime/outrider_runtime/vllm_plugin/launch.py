"""Starts vLLM with Outrider inside it, for the server and for the profiler:

    plan = plan_launch(boot, hot, paths)     # reads the drafts' configs; drops drafters that cannot load
    prepare(plan)                            # environment and the plan's file, for vLLM's processes
    server_arguments(plan)                   # in `arguments`: as `vllm serve` takes them, the model first
    smaller = after_failure(plan, error)     # if the engine did not start: the plan without the failed drafter

The engine core and the worker are processes of their own. They read the plan from `launch.json` in the folder of the
environment variable OUTRIDER_RUN_DIR. An engine in one process (tests, the profiler) reads it there, too; its arguments
are `engine_arguments`.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from outrider_crds.base import Model
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, HotConfig

from outrider_runtime.drafters.pool import HostedPool, choose_pool
from outrider_runtime.error_text import with_type
from outrider_runtime.paths import RUN_DIR_VARIABLE, Paths
from outrider_runtime.vllm_plugin.cause import CAUSE_FILE
from outrider_runtime.vllm_plugin.environment import engine_environment
from outrider_runtime.vllm_plugin.versions import check_engine_version
from outrider_runtime.worker_notes import FILES as WORKER_NOTES

PLAN_FILE = "launch.json"
FAILURES_FILE = "failed-drafters.jsonl"
FAILED_ELSEWHERE = "it cannot be started on another node; the log of that worker says why"
REFUSED_PICKLE = (
    "its weights are a pickle that holds more than tensors, which is never loaded: save them as safetensors"
)
SPECULATIVE_CONFIG = "SpeculativeConfig"  # named in the error when vLLM refuses one


class LaunchPlan(Model):
    boot: BootConfig
    hot: HotConfig
    """The config in force until the mounted file is read."""
    paths: Paths
    pool: HostedPool
    engine_version: str


def plan_launch(boot: BootConfig, hot: HotConfig, paths: Paths) -> LaunchPlan:
    """Decide what the engine hosts. Raises UntestedEngineError on a vLLM that was not tested."""
    version = check_engine_version()
    run_dir = paths.run_dir or os.environ.get(RUN_DIR_VARIABLE) or tempfile.mkdtemp(prefix="outrider-")
    return LaunchPlan(
        boot=boot,
        hot=hot,
        paths=paths.model_copy(update={"run_dir": run_dir}),
        pool=choose_pool(boot, paths.models),
        engine_version=version,
    )


def after_failure(plan: LaunchPlan, error: Exception) -> LaunchPlan | None:
    """Return the plan without the drafters that kept the engine from starting; None if no drafter was the cause.

    The worker notes drafters that fail after they were loaded, or that do not fit into memory. The remaining cause is a
    drafter that vLLM refuses while it resolves its config, which can only be the primary one.
    """
    failures = noted_failures(plan)
    pool = plan.pool
    for name in (drafter.name for drafter in plan.pool.hosted):
        pool = pool.without(name, failures[name]) if failures.get(name) else pool
    if pool != plan.pool:
        return plan.model_copy(update={"pool": pool})
    primary = plan.pool.primary
    if primary is None or SPECULATIVE_CONFIG not in str(error):
        return None
    reason = f"the engine refuses it: {' '.join(str(error).split())[:300]}"
    return plan.model_copy(update={"pool": plan.pool.without(primary.name, reason)})


def note_failure(drafter: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Note why the worker leaves `drafter` out; the engine core reads it with `noted_failures`."""
    path = Path(environ[RUN_DIR_VARIABLE], FAILURES_FILE)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({drafter: reason}) + "\n")


def start_failure(error: Exception) -> str:
    """Return why a drafter cannot be started, in a sentence for its user."""
    if isinstance(error, pickle.UnpicklingError):  # torch's own text advises to run the code in the file
        return REFUSED_PICKLE
    return f"it cannot be started: {with_type(error)}"


def note_failure_elsewhere(drafter: str) -> None:
    """Note that `drafter` is left out since it failed on another rank, which may be on another node."""
    note_failure(drafter, FAILED_ELSEWHERE)


def noted_failures(plan: LaunchPlan) -> dict[str, str]:
    """Return why the worker left drafters out, by drafter."""
    try:
        lines = Path(plan.paths.run_dir, FAILURES_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    notes = [note for line in lines for note in json.loads(line).items()]
    return dict(sorted(notes, key=lambda note: note[1] != FAILED_ELSEWHERE))  # the rank that it failed on knows more


def prepare(plan: LaunchPlan, environ: MutableMapping[str, str] = os.environ) -> None:
    """Write the plan for vLLM's processes, and set their environment."""
    write_plan(plan)
    environ.update(engine_environment(plan.boot, plan.paths.run_dir, environ))


def write_plan(plan: LaunchPlan) -> None:
    """Write the plan into the run folder, without what an earlier start left there."""
    run_dir = Path(plan.paths.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    for stale_file in (FAILURES_FILE, CAUSE_FILE, *WORKER_NOTES):
        (run_dir / stale_file).unlink(missing_ok=True)
    (run_dir / PLAN_FILE).write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")


def load_plan(environ: Mapping[str, str] = os.environ) -> LaunchPlan:
    """Read the plan of this process's engine. Raises RuntimeError if the engine was not started by Outrider."""
    run_dir = environ.get(RUN_DIR_VARIABLE)
    if not run_dir:
        raise RuntimeError(f"{RUN_DIR_VARIABLE} is not set: start the engine with `outrider-runtime serve`")
    return LaunchPlan.model_validate_json(Path(run_dir, PLAN_FILE).read_text(encoding="utf-8"))


def target_location(plan: LaunchPlan) -> str:
    """Return the engine's argument for the target: a folder, a bucket's URI, or a name on the hub."""
    return plan.paths.models.location(plan.boot.target, TARGET_MOUNT)
