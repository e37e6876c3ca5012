"""The engine process: starts an engine in this process and measures the shapes that its parent sends.

`remote` starts it as `python -m outrider_runtime.profiler.host BACKEND FD`. The engine runs its usual steps with a
pinned controller. Only the draft length that each request verifies is set before a step, so that every length is
measured, whatever the drafter proposes.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from outrider_crds.spec import Backend

from outrider_runtime.profiler import failures
from outrider_runtime.profiler.driver import Driver
from outrider_runtime.profiler.engines import ENGINES


def serve(backend: Backend, connection: Connection) -> None:
    """Measure until the parent closes the connection. An error is reported to the parent and ends the process."""
    try:
        driver = Driver(ENGINES[backend].start())
        connection.send(driver.ready())
        while True:
            connection.send(driver.visit(connection.recv()))
    except (EOFError, BrokenPipeError):
        return  # the parent is done, or has ended
    except BaseException as error:
        connection.send(failures.classify_exception(error))
        raise


def main() -> None:
    connection = Connection(int(sys.argv[2]))
    serve(Backend(sys.argv[1]), connection)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the engine's teardown, which takes seconds and has nothing to save


if __name__ == "__main__":
    main()
