"""Serves the bundled torch engine over HTTP: what `server.serve` takes from a backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider_crds.runtime_state import AdapterState

from outrider_runtime.server.config import Serving
from outrider_runtime.server.engine_server import Drain
from outrider_runtime.server.gate import App
from outrider_runtime.server.loading_thread import run_in_daemon_thread
from outrider_runtime.server.request_timeouts import with_head_timeout
from outrider_runtime.server.server_errors import StartupError
from outrider_runtime.torch_engine.torch_environment import engine_environment

if TYPE_CHECKING:
    import uvicorn

    from outrider_runtime.torch_engine.thread import Client

__all__ = ["MAX_HEADER_BYTES", "ServedTorchEngine", "engine_environment", "start_torch_engine"]

MAX_HEADER_BYTES = 64 * 1024
"""h11, uvicorn's HTTP parser, has the same default."""


@dataclass(slots=True)
class ServedTorchEngine:
    """The torch engine, and the OpenAI app in front of it."""

    client: Client
    app: Any

    @property
    def errored(self) -> bool:
        return self.client.errored

    @property
    def unfinished(self) -> int:
        return self.client.unfinished

    @property
    def adapters(self) -> tuple[AdapterState, ...]:
        """Return none: manifests with adapters for this engine are refused."""
        return ()

    def http_server(self, wrap: Callable[[App], App], drain: Drain) -> uvicorn.Server:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol  # the other parser does not limit headers

        class WithoutSignals(uvicorn.Server):
            """A server that leaves signals to `EngineServer`, which drains first."""

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        timeout = None if drain.timeout_s is None else max(1, round(drain.timeout_s))
        config = uvicorn.Config(
            wrap(self.app), log_level="warning", timeout_graceful_shutdown=timeout,
            http=with_head_timeout(H11Protocol), h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        config.load()
        return WithoutSignals(config)

    def after_serving(self, *, forced: bool) -> None:
        """Do nothing: requests that are still running end with the engine."""


@asynccontextmanager
async def start_torch_engine(serving: Serving) -> AsyncIterator[ServedTorchEngine]:
    """Load the torch engine; it stops at the end of the context. Raises StartupError for an unsupported model."""
    try:
        from outrider_runtime.torch_engine.app import ApiService, make_app
        from outrider_runtime.torch_engine.architecture import UnsupportedModelError
        from outrider_runtime.torch_engine.engine_loading import load
        from outrider_runtime.torch_engine.thread import Client
    except ModuleNotFoundError as error:
        raise StartupError(f"engine.backend Torch needs {error.name}: install Outrider with its extra torch") from None
    try:
        loaded = await run_in_daemon_thread(partial(load, serving.boot, serving.hot, serving.paths))
    except UnsupportedModelError as error:
        raise StartupError(str(error)) from error
    client = Client(loaded.engine)
    loaded.reporter.start()
    boot, text = serving.boot, loaded.text
    aliases = boot.engine.served_model_names
    service = ApiService(boot.target.name, text, loaded.vocabulary, loaded.engine.longest, client, aliases)
    try:
        yield ServedTorchEngine(client, make_app(service))
    finally:
        loaded.reporter.stop()
        client.stop()
