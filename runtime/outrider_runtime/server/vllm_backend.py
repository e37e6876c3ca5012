"""Starts vLLM's server: its arguments, engine client and app. No other module uses that part of vLLM.

It follows vLLM's own start (`vllm.entrypoints.launchers.api_server.entry`). vLLM is imported inside functions, because
its environment variables must be set before.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from outrider_runtime.server.engine_server import Drain
from outrider_runtime.server.gate import App
from outrider_runtime.server.schema_gate import Compiler, SchemaGate
from outrider_runtime.server.server_errors import StartupError
from outrider_runtime.vllm_plugin.arguments import prepare_vllm

if TYPE_CHECKING:
    import uvicorn

UNLIMITED_DRAIN_S = 24 * 3600
"""vLLM needs a number where a drain has no limit; longer than any request runs."""
TEARDOWN_S = 10
"""Time in which an idle engine frees its device."""


@dataclass(slots=True)
class ServedVLLM:
    """vLLM's engine client, and vLLM's OpenAI app in front of it."""

    client: Any
    app: Any
    arguments: Namespace

    @property
    def errored(self) -> bool:
        return bool(self.client.errored)

    @property
    def unfinished(self) -> int:
        return int(self.client.get_num_unfinished_requests())

    def http_server(self, wrap: Callable[[App], App], drain: Drain) -> uvicorn.Server:
        add_innermost(self.app, wrap)
        compiler = schema_compiler(self.client.vllm_config.structured_outputs_config.backend)
        if compiler is not None:
            add_innermost(self.app, lambda app: SchemaGate(app, compiler))
        self.app.state.server = server = _http_server(self.app, self.arguments, drain)
        return server

    def after_serving(self, *, forced: bool) -> None:
        # The engine has no requests left to wait for. It only has to free its device.
        self.client.vllm_config.shutdown_timeout = 0 if forced else TEARDOWN_S


def add_innermost(app: Any, wrap: Callable[[App], App]) -> None:
    """Add a middleware directly around the routes, inside all others.

    vLLM's own middleware outside it sets the root path, checks API keys, and adds to errors the headers that browsers
    need.
    """
    from starlette.middleware import Middleware

    app.user_middleware.append(Middleware(wrap))
    app.middleware_stack = None  # vLLM has built the stack already; None makes the app build it again


def schema_compiler(backend: str) -> Compiler | None:
    """Return the compiler that the engine uses for JSON schemas; None if vLLM's own check uses the same one."""
    if backend not in ("auto", "xgrammar"):
        return None
    from xgrammar import Grammar

    def compile_schema(schema: str) -> None:
        Grammar.from_json_schema(schema)

    return compile_schema


@asynccontextmanager
async def started_vllm(arguments: Namespace) -> AsyncIterator[ServedVLLM]:
    """Load vLLM's engine in a process of its own, and build its app; the engine stops at the end of the context."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    from outrider_runtime.vllm_plugin import engine_core

    engine_core.install()
    async with build_async_engine_client(arguments) as client:
        from outrider_runtime.vllm_plugin.bounded_input import BoundedInput  # imports torch: not before vLLM's fork

        client.input_processor = BoundedInput(client.vllm_config, client.renderer)
        tasks = await client.get_supported_tasks()
        app = build_app(arguments, tasks, client.model_config)
        await init_app_state(client, app.state, arguments, tasks)
        yield ServedVLLM(client, app, arguments)


def parse_arguments(words: list[str], drain: Drain) -> Namespace:
    """Parse the arguments of `vllm serve` with vLLM's own parser. Raises StartupError that names a wrong argument."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise StartupError(f"vLLM does not accept its arguments: {message}; see spec.engine.extraArgs")

    cli_env_setup()
    prepare_vllm()
    arguments: Namespace = make_arg_parser(Parser(prog="vllm serve")).parse_args(words)
    arguments.model = arguments.model_tag
    # Ctrl-C in a terminal reaches the engine's process, too, which must then finish its requests as well.
    arguments.shutdown_timeout = math.ceil(UNLIMITED_DRAIN_S if drain.timeout_s is None else drain.timeout_s)
    arguments.enable_request_id_headers = False  # the gate sets the header, once
    configure_logging_from_args(arguments)
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise StartupError(f"vLLM does not accept its arguments: {error}; see spec.engine.extraArgs") from error
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
