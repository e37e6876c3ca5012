"""`outrider-runtime`: the serving process of a pod, and of a laptop."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from outrider_crds.base import seconds
from outrider_crds.runtime_config import (
    ADMIN_PORT,
    BOOT_FILE,
    HOT_FILE,
    PODINFO_DIR,
    PROFILES_DIR,
    SERVING_PORT,
)

from outrider_runtime.local_manifest import DEFAULT_MODEL_ROOT, load_local_service
from outrider_runtime.paths import Paths
from outrider_runtime.server.config import Serving, read_local_manifest, read_mounted_config, run_folder
from outrider_runtime.server.engine_server import Drain
from outrider_runtime.server.group_place import GroupPlace, group_place
from outrider_runtime.server.hot_manifest import follow_manifest
from outrider_runtime.server.listeners import listen
from outrider_runtime.server.loading_thread import is_loading
from outrider_runtime.server.serve import Listeners, serve, work
from outrider_runtime.server.server_errors import StartupError

SERVE = "serve a model with speculative decoding that tunes itself"
LOOPBACK = "127.0.0.1"
POD_DRAIN_GRACE_S = 5.0  # until endpoints and proxies no longer send new requests


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a drain, 1 if the server cannot start or its engine died, 2 for wrong usage."""
    _configure_logging()
    options = _parser().parse_args(arguments)
    try:
        run_dir = run_folder()
    except StartupError as error:
        return _report_failure(error)
    try:
        status = _serve(options, run_dir)
    except StartupError as error:
        status = _report_failure(error)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    if is_loading():
        _exit_at_once(status)
    return status


def _exit_at_once(status: int) -> NoReturn:
    """Python's own end would stop a loading thread in the middle of native code, which may abort the process."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _configure_logging() -> None:
    """Add a handler for Outrider's loggers. vLLM and its libraries configure theirs, and the root logger, later."""
    outrider_logger = logging.getLogger("outrider_runtime")
    if outrider_logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [outrider] %(message)s", "%m-%d %H:%M:%S"))
    outrider_logger.addHandler(handler)
    outrider_logger.setLevel(logging.INFO)


def _report_failure(error: StartupError) -> int:
    """Print the last line of the log: the kubelet keeps it as the container's termination message."""
    print(f"outrider-runtime: {error}", file=sys.stderr, flush=True)
    return 1


def _serve(options: argparse.Namespace, run_dir: Path) -> int:
    serving = _read_config(options, run_dir)
    on_laptop = options.manifest is not None
    grace_s = options.drain_grace if options.drain_grace is not None else (0.0 if on_laptop else POD_DRAIN_GRACE_S)
    timeout_s = options.drain_timeout if options.drain_timeout is not None else serving.drain_timeout_s
    drain = Drain(grace_s=grace_s, timeout_s=timeout_s)
    place = group_place(serving.boot.engine.nodes, os.environ)
    host = options.host if options.host is not None else _default_host(place, on_laptop=on_laptop)
    if place is not None and not place.is_leader:
        return work(serving, place, options.admin_port, drain)
    with listen(host, options.port, "--port") as api, listen(host, options.admin_port, "--admin-port") as admin:
        if on_laptop:
            load = partial(load_local_service, options.manifest, options.model_root)
            follow_manifest(options.manifest, load, serving)
        return serve(serving, Listeners(api, admin), drain, place)


def _default_host(place: GroupPlace | None, *, on_laptop: bool) -> str:
    """Address to listen on: workers on other machines look at the leader's admin port."""
    return LOOPBACK if on_laptop and place is None else ""


def _read_config(options: argparse.Namespace, run_dir: Path) -> Serving:
    paths = Paths(
        hot_file=str(options.hot_config),
        profiles_dir=str(options.profiles),
        podinfo_dir=str(options.podinfo),
        run_dir=str(run_dir),
    )
    if options.manifest is not None:
        return read_local_manifest(options.manifest, options.model_root, paths)
    return read_mounted_config(options.config, paths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider-runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve_options(commands.add_parser("serve", help=SERVE))
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """Return the parser of `outrider-runtime serve` alone, from which the reference in docs/ is generated."""
    parser = argparse.ArgumentParser(prog="outrider-runtime serve", description=SERVE)
    _add_serve_options(parser)
    return parser


def _add_serve_options(command: argparse.ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, default=Path(BOOT_FILE), help="boot config, as the operator mounts it")
    source.add_argument(
        "-f", "--manifest", type=Path, help="file with a SpeculativeService, to serve it without Kubernetes"
    )
    command.add_argument(
        "--model-root",
        type=Path,
        default=DEFAULT_MODEL_ROOT,
        help="with -f: folder with models; a hostPath model whose path is not on this machine is searched there by the "
        "last part of its path (default: %(default)s)",
    )
    command.add_argument(
        "--hot-config", type=Path, default=Path(HOT_FILE), help="hot config; changes take effect without a restart"
    )
    command.add_argument("--profiles", type=Path, default=Path(PROFILES_DIR), help="folder with latency profiles")
    command.add_argument(
        "--podinfo", type=Path, default=Path(PODINFO_DIR), help="folder where the downward API is mounted"
    )
    command.add_argument(
        "--host",
        help="address that both ports listen on (default: all; with -f this machine only, if engine.nodes is 1)",
    )
    command.add_argument("--port", type=int, default=SERVING_PORT, help="port of the OpenAI API (default: %(default)s)")
    command.add_argument(
        "--admin-port", type=int, default=ADMIN_PORT, help="port of probes, state and metrics (default: %(default)s)"
    )
    command.add_argument(
        "--drain-grace",
        type=_duration,
        metavar="DURATION",
        help="how long new requests are still served after SIGTERM, for example 5s (default: 5s; with -f 0s)",
    )
    command.add_argument(
        "--drain-timeout",
        type=_duration,
        metavar="DURATION",
        help="how long running requests may take after the grace, for example 2m (default: until they finish; with -f "
        "rollout.drainTimeout)",
    )


def _duration(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
