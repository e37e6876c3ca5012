"""The one module that touches vLLM's server: arguments, engine client, app, and the HTTP server around them.

It is vLLM's own start (`vllm.entrypoints.launchers.api_server.entry`) with three differences: the gate in front of
the app, a drain instead of an abort on SIGTERM, and an exit code that says whether the engine died. vLLM is imported
inside functions: the environment must be complete before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from outrider_runtime.server.errors import StartupError
from outrider_runtime.server.gate import App
from outrider_runtime.server.health import Phase
from outrider_runtime.server.watch import ServerView
from outrider_runtime.vllm_plugin.arguments import prepare_vllm

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)
BEAT_S = 0.5
SAME_SIGNAL_S = 1.0
"""Programs that signal a process and then its group send one signal twice."""
UNBOUNDED_DRAIN_S = 24 * 3600
TEARDOWN_S = 10


class EngineDiedError(Exception):
    """The engine's process ended while it served."""


@dataclass(frozen=True, slots=True)
class Drain:
    """How a server goes: first it only stops being ready, then it takes no more, then it stops waiting."""

    grace_s: float
    """New requests are still served for so long: endpoints and proxies learn of a pod's end with a delay."""
    timeout_s: float | None
    """Running requests may take so long after that; None waits as long as they do (the kubelet bounds it)."""


@dataclass(slots=True)
class EngineServer:
    """vLLM's app over one engine. `view` may be asked from any thread; all else runs in the event loop."""

    wrap: Callable[[App], App]
    drain: Drain
    announce: Callable[[], None]
    """Called once, when requests are taken."""
    phase: Phase = Phase.STARTING
    loop_beat: float | None = None
    _client: Any = None
    _server: uvicorn.Server | None = None
    _signalled_at: float | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def view(self) -> ServerView:
        client = self._client
        return ServerView(
            phase=self.phase,
            engine_dead=client is not None and client.errored,
            unfinished=0 if client is None else client.get_num_unfinished_requests(),
            loop_beat=self.loop_beat,
        )

    async def serve(self, arguments: Namespace, listener: socket.socket) -> None:
        """Load the engine and serve until a signal has drained it. Raises EngineDiedError when the engine went first.

        What vLLM raises while the engine starts passes through.
        """
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

        async with build_async_engine_client(arguments) as client:
            await self._serve_client(client, arguments, listener)
            # Ctrl-C reaches the engine's process, too: one that drained first and left has not died.
            died = client.errored and self._signalled_at is None
        if died:
            raise EngineDiedError("the engine process has died; its own last lines above say why")

    async def _serve_client(self, client: Any, arguments: Namespace, listener: socket.socket) -> None:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await client.get_supported_tasks()
        app = build_app(arguments, tasks, client.model_config)
        await init_app_state(client, app.state, arguments, tasks)
        self._client = client
        self._server = app.state.server = _http_server(self.wrap(app), arguments, self.drain)
        self._handle_signals()
        self._tasks.append(asyncio.create_task(self._beat()))
        self.phase = Phase.SERVING
        self.announce()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            # No request is left that the engine should wait for; it only has to let go of its device.
            client.vllm_config.shutdown_timeout = 0 if self._server.force_exit else TEARDOWN_S
            self.phase = Phase.DRAINING
            for task in self._tasks:
                task.cancel()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        assert self._server is not None
        now = time.monotonic()
        if self._signalled_at is not None:
            if now - self._signalled_at > SAME_SIGNAL_S:
                logger.warning("second signal: stopping at once")
                self._server.force_exit = self._server.should_exit = True
            return
        self._signalled_at = now
        self.phase = Phase.DRAINING
        self._tasks.append(asyncio.create_task(self._drain(self._server)))

    async def _drain(self, server: uvicorn.Server) -> None:
        running = self.view().unfinished
        logger.warning("draining: %d requests run; new ones are taken for %.0f s more", running, self.drain.grace_s)
        await asyncio.sleep(self.drain.grace_s)
        server.should_exit = True  # uvicorn closes the listener and waits for open requests

    async def _beat(self) -> None:
        """Show that the loop runs, and end the server when the engine has died: the kubelet starts a new one."""
        while True:
            self.loop_beat = time.monotonic()
            if self._client.errored and self._server is not None:
                self._server.force_exit = self._server.should_exit = True
            await asyncio.sleep(BEAT_S)


def parse_arguments(words: list[str], drain: Drain) -> Namespace:
    """vLLM's own parse of its server's arguments. Raises StartupError with the argument that it does not take."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise StartupError(f"the engine does not take its arguments: {message}; see spec.engine.extraArgs")

    cli_env_setup()
    prepare_vllm()
    arguments: Namespace = make_arg_parser(Parser(prog="vllm serve")).parse_args(words)
    arguments.model = arguments.model_tag
    # Ctrl-C in a terminal goes to every process: the engine's, too, must finish its requests then.
    arguments.shutdown_timeout = math.ceil(UNBOUNDED_DRAIN_S if drain.timeout_s is None else drain.timeout_s)
    configure_logging_from_args(arguments)
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise StartupError(f"the engine does not take its arguments: {error}; see spec.engine.extraArgs") from error
    return arguments


def _http_server(app: App, arguments: Namespace, drain: Drain) -> uvicorn.Server:
    import uvicorn
    from vllm import envs
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    log_config = get_uvicorn_log_config(arguments)
    config = uvicorn.Config(
        app,
        log_level=arguments.uvicorn_log_level,
        access_log=not arguments.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=None if drain.timeout_s is None else max(1, round(drain.timeout_s)),
        ssl_keyfile=arguments.ssl_keyfile,
        ssl_certfile=arguments.ssl_certfile,
        ssl_ca_certs=arguments.ssl_ca_certs,
        ssl_cert_reqs=arguments.ssl_cert_reqs,
        ssl_ciphers=arguments.ssl_ciphers,
        **({} if log_config is None else {"log_config": log_config}),
    )
    config.load()
    server: uvicorn.Server = NoSignalServer(config)
    return server
