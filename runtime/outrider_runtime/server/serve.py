"""Builds a server from engine, gate and admin port. If a drafter breaks the engine's start, starts again without it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from outrider_crds.model_sources import ModelRef, ModelSource
from outrider_crds.runtime_config import STATE_PATH, BootConfig
from outrider_crds.runtime_state import RuntimeState, SLOClassState
from outrider_crds.spec import Backend

from outrider_runtime.bucket import is_bucket
from outrider_runtime.drafters.pool import model_config
from outrider_runtime.drafters.suffix import names_tenants
from outrider_runtime.server.admin import AdminPages, serve_admin
from outrider_runtime.server.config import Serving
from outrider_runtime.server.engine_server import SIGNALLED, Drain, EngineDiedError, EngineServer
from outrider_runtime.server.gate import App, RequestGate
from outrider_runtime.server.group_place import GroupPlace
from outrider_runtime.server.group_worker import LeaderWatch, run_worker
from outrider_runtime.server.health import Phase, why_not_alive
from outrider_runtime.server.request_traces import request_traces, trace_arguments, trace_environment
from outrider_runtime.server.server_environment import server_environment
from outrider_runtime.server.server_errors import StartupError
from outrider_runtime.server.vllm_backend import parse_arguments, start_vllm
from outrider_runtime.server.watch import EngineWatch
from outrider_runtime.snapshot import blank_state, read_decisions, read_snapshot
from outrider_runtime.vllm_plugin.arguments import server_arguments
from outrider_runtime.vllm_plugin.cause import cause
from outrider_runtime.vllm_plugin.launch import (
    LaunchPlan,
    after_failure,
    plan_launch,
    prepare,
    target_location,
)
from outrider_runtime.vllm_plugin.versions import UntestedEngineError

TORCH_BACKEND = "outrider_runtime.torch_engine.served_engine"
"""Module of the Torch backend, by name: it is built on this package, which runs without it."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listeners:
    api: socket.socket
    admin: socket.socket


def work(serving: Serving, place: GroupPlace, admin_port: int, drain: Drain) -> int:
    """Compute for the leader of a group until that is gone, and return the exit status.

    admin_port: the leader's, whose end is the leader's. Raises StartupError when the ranks cannot start or one dies.
    """
    plan = _plan(serving)
    _prepare(plan, os.environ)
    leader = LeaderWatch(place.leader, admin_port)
    logger.info("joining %s as worker %d of %d", place.leader, place.rank, place.nodes)
    leader.start()
    arguments = parse_arguments([*server_arguments(plan, place.arguments), "--api-server-count=0"], drain)
    try:
        run_worker(arguments, leader)
    except Exception as error:
        logger.exception("the worker did not start")
        raise StartupError(f"the worker did not start: {cause(plan.paths.run_dir) or error}") from error
    raise StartupError(f"a rank of this worker ended: {cause(plan.paths.run_dir) or 'see its last log lines above'}")


def serve(serving: Serving, listeners: Listeners, drain: Drain, place: GroupPlace | None = None) -> int:
    """Serve until a signal ends the server, and return the exit status.

    place: given for the leader of a group. Raises StartupError when the server cannot start or its engine dies: either
    way a line says why.
    """
    is_torch = serving.boot.engine.backend is Backend.TORCH
    plan = None if is_torch else _plan(serving)
    run_dir = serving.paths.run_dir
    watch = EngineWatch(read=lambda: read_snapshot(run_dir), blank=_blank(serving, time.time()))
    watch.start()
    serve_admin(listeners.admin, AdminPages(watch.vitals, watch.state, decisions=lambda: read_decisions(run_dir)))
    logger.info("loading %s; its state is at %s%s", serving.boot.target.name, _address(listeners.admin), STATE_PATH)
    try:
        if plan is None:
            status = _serve_torch(serving, watch, listeners.api, drain)
        else:
            status = _serve_until_drained(plan, serving, watch, listeners.api, drain, place)
    except EngineDiedError as error:
        raise StartupError(f"{error}: {cause(run_dir) or 'see its last log lines above'}") from error
    except _StoppedWhileStarting as stop:
        logger.warning("stopped while the engine was starting")
        return stop.status
    if reason := why_not_alive(watch.vitals()):  # the kubelet keeps the log's end as the reason of a restart
        logger.error("the pod was stopped while %s", reason)
    return status


def _plan(serving: Serving) -> LaunchPlan:
    try:
        plan = plan_launch(serving.boot, serving.hot, serving.paths)
    except UntestedEngineError as error:
        raise StartupError(str(error)) from error
    _check_target(serving.boot.target, target_location(plan))
    for name, reason in plan.pool.dropped.items():
        logger.warning("drafter %r is not used: %s", name, reason)
    return plan


def _check_target(target: ModelRef, location: str) -> None:
    """Raise StartupError if no model that this user can read is at `location`. Names on the hub pass."""
    folder = Path(location)
    if is_bucket(location):
        _check_bucket(target, location)
    if not folder.is_absolute():
        return
    if not os.access(folder / "config.json", os.R_OK):
        what = f"the target {target.name!r} is not there: {folder} has no readable config.json"
        raise StartupError(f"{what}; {_remedy(target.source)}")
    unreadable = sorted(file.name for file in folder.iterdir() if not os.access(file, os.R_OK))
    if unreadable:  # safetensors writes weights with mode 0600
        files = ", ".join(unreadable)
        raise StartupError(
            f"the target {target.name!r} cannot be read: the pod's user has no permission to read {files} in {folder}"
        )


def _check_bucket(target: ModelRef, location: str) -> None:
    try:
        model_config(target, location)
    except (OSError, ValueError) as error:
        raise StartupError(f"the target {target.name!r} is not there: {error}") from error


def _remedy(source: ModelSource) -> str:
    if source.oci is not None:
        folder = source.oci.path or "its root"
        return f"the image {source.oci.reference} holds no model in {folder}; check reference and path of source.oci"
    return "check the path in spec.target.source, and that the pod's user may read it"


def _serve_torch(serving: Serving, watch: EngineWatch, listener: socket.socket, drain: Drain) -> int:
    backend = import_module(TORCH_BACKEND)
    os.environ.update(backend.engine_environment(serving.boot, os.environ))
    os.environ.update(server_environment(os.environ, Path(serving.paths.run_dir)))
    server = _server(serving.boot, watch, listener, drain)
    asyncio.run(server.serve(backend.start_torch_engine(serving), listener))
    return server.exit_status


def _server(boot: BootConfig, watch: EngineWatch, listener: socket.socket, drain: Drain) -> EngineServer:
    def add_gate(app: App) -> App:
        tenants = names_tenants(boot.draft_pool)
        return RequestGate(app, watch.gate_facts, request_traces(os.environ), names_tenants=tenants)

    def announce() -> None:
        logger.info("serving %s: OpenAI API on %s/v1", boot.target.name, _address(listener))

    server = EngineServer(wrap=add_gate, drain=drain, announce=announce)
    watch.follow(server.view)
    for number in (signal.SIGTERM, signal.SIGINT):  # the server replaces these handlers once the engine has started
        signal.signal(number, _stop)
    return server


def _serve_until_drained(
    plan: LaunchPlan,
    serving: Serving,
    watch: EngineWatch,
    listener: socket.socket,
    drain: Drain,
    place: GroupPlace | None,
) -> int:
    """Serve with vLLM. A drafter that keeps the engine from starting is dropped, and the engine started again.

    In a group it ends the start: the workers' ranks are gone with the engine's.
    """
    import uvloop

    remaining = plan
    while True:
        _prepare(remaining, os.environ)
        server = _server(plan.boot, watch, listener, drain)
        try:
            arguments = parse_arguments(_arguments(remaining, place), drain)
            uvloop.run(server.serve(start_vllm(arguments, serving), listener))
        except (StartupError, EngineDiedError):
            raise
        except Exception as error:
            if server.phase is not Phase.STARTING:
                raise
            if place is not None:
                raise StartupError(f"the group did not start: {cause(plan.paths.run_dir) or error}") from error
            remaining = _drop_failed_drafter(remaining, error)
        else:
            return server.exit_status


def _arguments(plan: LaunchPlan, place: GroupPlace | None) -> list[str]:
    """Return the arguments of vLLM's server."""
    arguments = server_arguments(plan, [] if place is None else place.arguments)
    return [*arguments, *trace_arguments(os.environ, arguments)]


def _drop_failed_drafter(plan: LaunchPlan, error: Exception) -> LaunchPlan:
    """Return the plan without the drafter that caused `error`. Raises StartupError if no drafter did."""
    logger.exception("the engine did not start")
    smaller = after_failure(plan, error)
    if smaller is None:
        raise StartupError(f"the engine did not start: {cause(plan.paths.run_dir) or error}") from error
    for name in smaller.pool.dropped.keys() - plan.pool.dropped.keys():
        logger.warning("starting again without the drafter %r: %s", name, smaller.pool.dropped[name])
    return smaller


def _prepare(plan: LaunchPlan, environ: MutableMapping[str, str]) -> None:
    prepare(plan, environ)
    environ.update(server_environment(environ, Path(plan.paths.run_dir)))
    environ.update(trace_environment(environ, plan.boot.service))


class _StoppedWhileStarting(SystemExit):
    """A signal arrived while the engine was starting. vLLM ignores a KeyboardInterrupt at that time."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise _StoppedWhileStarting(SIGNALLED + number)


def _blank(serving: Serving, started_at: float) -> RuntimeState:
    """Return the state before the engine's first report. It has the SLO classes, so that requests may name them."""
    classes = [SLOClassState(name=slo.name) for slo in serving.hot.slo_classes]
    return blank_state(serving.boot, serving.hot, started_at=started_at).model_copy(update={"slo_classes": classes})


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{'localhost' if host in ('::', '0.0.0.0', '127.0.0.1') else host}:{port}"
