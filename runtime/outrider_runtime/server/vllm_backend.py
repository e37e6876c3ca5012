"""Starts vLLM's server: its arguments, engine client and app. No other module uses that part of vLLM.

It follows vLLM's own start (`vllm.entrypoints.launchers.api_server.entry`). vLLM is imported inside functions, because
its environment variables must be set before.
"""

from __future__ import annotations

import asyncio
import math
import re
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outrider_crds.runtime_state import AdapterState

from outrider_runtime.server.adapter_files import AdapterFiles, UnusableAdapterError, folder_for_copies
from outrider_runtime.server.adapter_keeper import AdapterKeeper
from outrider_runtime.server.config import Serving
from outrider_runtime.server.engine_server import Drain
from outrider_runtime.server.gate import App
from outrider_runtime.server.request_timeouts import with_head_timeout
from outrider_runtime.server.schema_gate import SchemaGate, schema_compiler
from outrider_runtime.server.server_errors import StartupError
from outrider_runtime.vllm_plugin.arguments import prepare_vllm
from outrider_runtime.vllm_plugin.launch import REFUSED_PICKLE
from outrider_runtime.vllm_plugin.patches import INPUT_PROCESSOR, MIDDLEWARES, put

if TYPE_CHECKING:
    import uvicorn

UNLIMITED_DRAIN_S = 24 * 3600
"""vLLM needs a number where a drain has no limit; longer than any request runs."""
TEARDOWN_S = 10
"""Time in which an idle engine frees its device."""
MOST_FIRST_LOADS_S = 120.0
"""Longest time that a start waits for adapters: the target is served without those that take longer."""


@dataclass(slots=True)
class ServedVLLM:
    """vLLM's engine client, and vLLM's OpenAI app in front of it."""

    client: Any
    app: Any
    arguments: Namespace
    keeper: AdapterKeeper | None = None
    """None without engine.lora."""

    @property
    def errored(self) -> bool:
        return bool(self.client.errored)

    @property
    def unfinished(self) -> int:
        return int(self.client.get_num_unfinished_requests())

    @property
    def adapters(self) -> tuple[AdapterState, ...]:
        return () if self.keeper is None else self.keeper.states()

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
    put(MIDDLEWARES, None, of=app)  # vLLM has built the stack already


class VLLMAdapters:
    """The adapters of a running engine. vLLM's API server finds the adapter of a request in `models`, by its name."""

    def __init__(self, client: Any, models: Any) -> None:
        self._client = client
        self._models = models
        self._requests: dict[int, Any] = {}

    async def add(self, name: str, folder: Path) -> int:
        from vllm.lora.request import LoRARequest

        number: int = self._models.lora_id_counter.inc(1)
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder))
        try:
            await self._client.add_lora(request)
        except Exception as error:
            with suppress(Exception):  # some of it may be in a slot
                await self._client.remove_lora(number)
            raise UnusableAdapterError(engine_sentence(str(error))) from error
        self._requests[number] = request
        return number

    def offer(self, number: int) -> None:
        request = self._requests[number]
        self._models.lora_requests[request.lora_name] = request

    def withdraw(self, name: str) -> None:
        self._models.lora_requests.pop(name, None)

    def is_used(self, number: int) -> bool:
        states = self._client.output_processor.request_states.values()
        return any(state.lora_request is not None and state.lora_request.lora_int_id == number for state in states)

    async def remove(self, number: int) -> None:
        del self._requests[number]
        await self._client.remove_lora(number)


def engine_sentence(message: str) -> str:
    """Return what the worker said, without the frames that the engine's processes put around it."""
    worker = re.search(r"Worker failed with error '(.*)', please check", message, re.DOTALL)
    said = worker[1] if worker else message
    if "Weights only load failed" in said:
        return REFUSED_PICKLE
    unknown = re.search(r"expected target modules in .* but received \['([^']+)'", said, re.DOTALL)
    if unknown:
        return f"it does not fit the target: it changes {unknown[1]}, which the target does not have"
    return " ".join(said.removeprefix("Call to add_lora method failed: ").split())


@asynccontextmanager
async def _adapters(client: Any, app: Any, serving: Serving) -> AsyncIterator[AdapterKeeper | None]:
    """Load the adapters of the hot config, and follow its changes until the end of the context."""
    lora, mounted = serving.boot.engine.lora, serving.paths.mounted
    if lora is None:
        yield None
        return
    hosted = VLLMAdapters(client, app.state.openai_serving_models)
    with folder_for_copies(in_pod=mounted) as copies:
        files = AdapterFiles(lora, mounted, copies)
        keeper = AdapterKeeper(hosted, files, Path(serving.paths.hot_file), serving.hot)
        await keeper.first_loads(MOST_FIRST_LOADS_S)
        following = asyncio.create_task(keeper.run())
        try:
            yield keeper
        finally:
            following.cancel()
            keeper.stop()


@asynccontextmanager
async def start_vllm(arguments: Namespace, serving: Serving) -> AsyncIterator[ServedVLLM]:
    """Load vLLM's engine in a process of its own, and build its app; the engine stops at the end of the context."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    from outrider_runtime.vllm_plugin import engine_core

    engine_core.install()
    async with build_async_engine_client(arguments) as client:
        from outrider_runtime.vllm_plugin.bounded_input import BoundedInput  # imports torch: not before vLLM's fork

        put(INPUT_PROCESSOR, BoundedInput(client.vllm_config, client.renderer), of=client)
        tasks = await client.get_supported_tasks()
        app = build_app(arguments, tasks, client.model_config)
        await init_app_state(client, app.state, arguments, tasks)
        async with _adapters(client, app, serving) as keeper:
            yield ServedVLLM(client, app, arguments, keeper)


def parse_arguments(words: list[str], drain: Drain) -> Namespace:
    """Parse the arguments of `vllm serve` with vLLM's own parser. Raises StartupError that names a wrong argument."""
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from outrider_runtime.vllm_plugin.versions import cli_env_setup, make_arg_parser, validate_parsed_serve_args

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
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
    from vllm import envs
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    log_config = get_uvicorn_log_config(arguments)
    config = uvicorn.Config(
        app,
        log_level=arguments.uvicorn_log_level,
        access_log=not arguments.disable_uvicorn_access_log,
        http=with_head_timeout(AutoHTTPProtocol),
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
