"""The one thread that owns the engine, and the two queues between it and the server's event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.inference_engine import InferenceEngine, Output

logger = logging.getLogger(__name__)


class EngineDeadError(Exception):
    """A step raised: nothing that the engine holds can be trusted any more."""


class _New(NamedTuple):
    request: Request
    arrived_at: float
    extra_args: dict[str, object]


class _Left(NamedTuple):
    name: str


class EngineThread:
    """In: requests, and the names of those whose clients left. Out: what each step gives."""

    def __init__(
        self, engine: InferenceEngine, put_out: Callable[[Sequence[Output]], None], died: Callable[[], None]
    ) -> None:
        """put_out, died: called on this thread."""
        self._engine = engine
        self._in: queue.SimpleQueue[_New | _Left | None] = queue.SimpleQueue()
        self._put_out, self._died = put_out, died
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: Request, extra_args: dict[str, object]) -> None:
        self._in.put(_New(request, time.time(), extra_args))

    def abort(self, name: str) -> None:
        self._in.put(_Left(name))

    def stop(self) -> None:
        """Ends after the step that runs."""
        self._in.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._engine.has_work:
                    self._put_out(self._engine.step())
        except Exception:
            logger.exception("the engine's step raised")
            self._died()

    def _take_in(self) -> bool:
        """All that came; waits where there is nothing to do. False: it is to end."""
        while True:
            try:
                came = self._in.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if came is None:
                return False
            if isinstance(came, _New):
                self._engine.add(*came)
            else:
                self._engine.abort(came.name)


class Client:
    """The event loop's side: each request's outputs as they come."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.errored = False
        self._loop = asyncio.get_running_loop()
        self._answers: dict[str, tuple[int, asyncio.Queue[tuple[int, Output] | None]]] = {}
        self._thread = EngineThread(engine, self._from_thread(self._arrived), self._from_thread(self._died))
        self._thread.start()

    @property
    def unfinished(self) -> int:
        return len(self._answers)

    async def answers(
        self, requests: Sequence[Request], extra_args: dict[str, object]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Each output with its request's place. Raises EngineDeadError. Where the caller goes before the end, the
        requests end at once."""
        came: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
        if self.errored:
            raise EngineDeadError
        for place, request in enumerate(requests):
            self._answers[request.name] = place, came
            self._thread.add(request, extra_args)
        try:
            left = len(requests)
            while left:
                one = await came.get()
                if one is None:
                    raise EngineDeadError
                yield one
                left -= one[1].finish is not None
        finally:
            for request in requests:
                del self._answers[request.name]
                self._thread.abort(request.name)

    def stop(self) -> None:
        self._thread.stop()

    def _from_thread(self, call: Callable[..., None]) -> Callable[..., None]:
        def soon(*arguments: object) -> None:
            self._loop.call_soon_threadsafe(call, *arguments)

        return soon

    def _arrived(self, outputs: Sequence[Output]) -> None:
        for one in outputs:
            if one.request in self._answers:
                place, came = self._answers[one.request]
                came.put_nowait((place, one))

    def _died(self) -> None:
        self.errored = True
        for _, came in self._answers.values():
            came.put_nowait(None)
