"""`outrider-profile`: measures a target and its drafters, and writes the result where Kubernetes reads it."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from outrider_crds.base import seconds
from outrider_crds.profile import ProfilingResult
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import BootConfig
from pydantic import ValidationError

from outrider_runtime.local_manifest import DEFAULT_MODEL_ROOT, LocalManifestError, load_local_service
from outrider_runtime.paths import Paths
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.documents import termination_message
from outrider_runtime.profiler.profile_report import print_report, write_report
from outrider_runtime.profiler.run import Profile, Profiler, ProfilingTask, Say
from outrider_runtime.vllm_plugin.versions import UntestedEngineError

TERMINATED = 143  # 128 + SIGTERM, as a shell reports it


class UsageError(Exception):
    """The command line names something that does not exist. The message says what, and what to do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit with 0 if something was measured, 1 if nothing could be measured, 2 for a wrong command line."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    options = parser().parse_args(arguments)
    try:
        task, paths = _task(options)
        budget_s = seconds(options.time_budget)
    except (UsageError, LocalManifestError, ValueError) as error:
        print(f"outrider-profile: {error}", file=sys.stderr)
        _write(options.result, failure_result(failures.ENGINE_FAILED, str(error)))
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="outrider-profile-") as run_dir:
        profile = _profile(task, paths.model_copy(update={"run_dir": run_dir}), budget_s)
    _write(options.result, profile.result())
    if options.file or options.report:
        print_report(profile, sys.stdout)
    if options.report:
        write_report(profile, options.report)
    sys.exit(0 if profile.target or profile.drafters else 1)


def failure_result(reason: str, message: str) -> ProfilingResult:
    """Return a result with nothing but a failure."""
    return ProfilingResult(failures=[failures.failure(reason, message)])


def _profile(task: ProfilingTask, paths: Paths, budget_s: float) -> Profile:
    try:
        return Profiler(task, paths, budget_s, _say()).run()
    except UntestedEngineError as error:
        return Profile(failures=[failures.failure(failures.ENGINE_FAILED, str(error))])


def _task(options: argparse.Namespace) -> tuple[ProfilingTask, Paths]:
    if options.file:
        boot = load_local_service(options.file, options.model_root).boot
        paths = Paths(mounted=False)
    else:
        boot = _boot(options.config_json)
        paths = Paths()
    keys = _keys(boot, options.product or boot.accelerator.products[0])
    everything = not options.target and not options.drafter
    names = [d.name for d in boot.draft_pool] if everything else options.drafter
    pool = {drafter.name: drafter for drafter in boot.draft_pool}
    unknown = [name for name in names if name not in pool]
    if unknown:
        raise UsageError(f"--drafter {unknown[0]}: the pool has {', '.join(pool) or 'no drafters'}")
    return ProfilingTask(boot, keys, options.target or everything, tuple(pool[name] for name in names)), paths


def _boot(text: str) -> BootConfig:
    try:
        return BootConfig.read(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"--config-json is no boot config: {place}: {problem['msg']}") from error


def _keys(boot: BootConfig, product: str) -> ProfileKeys:
    for keys in boot.profile_keys:
        if keys.product == product:
            return keys
    known = ", ".join(keys.product for keys in boot.profile_keys) or "none"
    raise UsageError(f"--product {product}: the configuration has keys for {known}")


def _say() -> Say:
    began = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _write(path: Path | None, result: ProfilingResult) -> None:
    """Write the result for the kubelet, which reads the file when the container has ended."""
    if path is not None:
        path.write_text(termination_message(result), encoding="utf-8")


def _exit_on_signal(_signal: int, _frame: FrameType | None) -> None:
    """Exit without a result, because none is complete. The exit also ends the engine's process."""
    sys.exit(TERMINATED)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="outrider-profile",
        description="Measure how long engine steps of a target and its drafters take on this hardware.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", type=Path, metavar="MANIFEST", help="profile the service of this manifest")
    source.add_argument("--config-json", metavar="JSON", help="the service's boot config, as the operator passes it")
    parser.add_argument(
        "--product", help="accelerator product that the result is for (default: the first of the service)"
    )
    parser.add_argument("--target", action="store_true", help="measure the target")
    parser.add_argument(
        "--drafter", action="append", default=[], metavar="NAME", help="measure this drafter; may be repeated"
    )
    parser.add_argument(
        "--time-budget", default="5m", help="time for measuring, without the engine's start (default %(default)s)"
    )
    parser.add_argument("--result", type=Path, metavar="FILE", help="file for the ProfilingResult, at most 4096 bytes")
    parser.add_argument("--report", type=Path, metavar="DIR", help="folder for report.json and the plot report.png")
    parser.add_argument(
        "--model-root",
        type=Path,
        default=DEFAULT_MODEL_ROOT,
        help="with -f: folder with models; a hostPath model whose path is not on this machine is searched there by the "
        "last part of its path (default %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main()
