"""The thread that owns the engine, and the queues between it and the server's event loop."""

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
    """A step raised an exception, so the engine's state can no longer be trusted."""


class _Arrival(NamedTuple):
    request: Request
    arrived_at: float
    extra_args: dict[str, object]


class _Abort(NamedTuple):
    name: str


class EngineThread:
    """Runs the engine's steps. Requests and aborts come in through a queue; each step's outputs go to a callback."""

    def __init__(
        self, engine: InferenceEngine, deliver: Callable[[Sequence[Output]], None], died: Callable[[], None]
    ) -> None:
        """deliver: takes each step's outputs. died: called when a step raises. Both are called on this thread."""
        self._engine = engine
        self._messages: queue.SimpleQueue[_Arrival | _Abort | None] = queue.SimpleQueue()
        self._deliver = deliver
        self._died = died
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: Request, extra_args: dict[str, object]) -> None:
        self._messages.put(_Arrival(request, time.time(), extra_args))

    def abort(self, name: str) -> None:
        self._messages.put(_Abort(name))

    def stop(self) -> None:
        """End the thread after the step that is running."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._handle_messages():
                if self._engine.has_work:
                    self._deliver(self._engine.step())
        except Exception:
            logger.exception("a step of the engine failed; the engine stops and the pod restarts")
            self._died()

    def _handle_messages(self) -> bool:
        """Handle all queued messages; wait for one while the engine has no work. False: the thread is to end."""
        while True:
            try:
                message = self._messages.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, _Arrival):
                self._engine.add(*message)
            else:
                self._engine.abort(message.name)


class Client:
    """The event loop's side of the engine: passes requests on and yields their outputs."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.errored = False
        self._loop = asyncio.get_running_loop()
        self._answers: dict[str, tuple[int, asyncio.Queue[tuple[int, Output] | None]]] = {}
        self._thread = EngineThread(engine, self._from_thread(self._deliver), self._from_thread(self._end_answers))
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests whose answers are not complete."""
        return len(self._answers)

    async def answers(
        self, requests: Sequence[Request], extra_args: dict[str, object]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield each output with its request's index. Raises EngineDeadError.

        When the caller closes the generator early, the engine drops the requests.
        """
        outputs: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
        if self.errored:
            raise EngineDeadError
        for index, request in enumerate(requests):
            self._answers[request.name] = index, outputs
            self._thread.add(request, extra_args)
        try:
            unfinished = len(requests)
            while unfinished:
                indexed_output = await outputs.get()
                if indexed_output is None:
                    raise EngineDeadError
                yield indexed_output
                _, output = indexed_output
                unfinished -= output.finish is not None
        finally:
            for request in requests:
                del self._answers[request.name]
                self._thread.abort(request.name)

    def stop(self) -> None:
        self._thread.stop()

    def _from_thread(self, call: Callable[..., None]) -> Callable[..., None]:
        """Wrap `call` so that the engine's thread may call it: it then runs on the event loop."""

        def soon(*arguments: object) -> None:
            self._loop.call_soon_threadsafe(call, *arguments)

        return soon

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.request in self._answers:
                index, queued = self._answers[output.request]
                queued.put_nowait((index, output))

    def _end_answers(self) -> None:
        self.errored = True
        for _, queued in self._answers.values():
            queued.put_nowait(None)
