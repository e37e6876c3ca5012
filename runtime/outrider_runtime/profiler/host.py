"""The engine process: starts an engine in this very process and runs the shapes it is asked for.

Started by `remote` as `python -m outrider_runtime.profiler.host BACKEND FD`. The steps are the engine's own, with the
controller pinned; only how many proposals each request verifies is ours, written onto the requests before each step,
so that every length is measured whatever the drafter would have found.
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
    """Answer until the parent hangs up. What goes wrong is told to the parent, and ends the process."""
    try:
        driver = Driver(ENGINES[backend].start())
        connection.send(driver.ready())
        while True:
            connection.send(driver.visit(connection.recv()))
    except (EOFError, BrokenPipeError):
        return  # the parent is done, or gone
    except BaseException as error:
        connection.send(failures.of_exception(error))
        raise


def main() -> None:
    connection = Connection(int(sys.argv[2]))
    serve(Backend(sys.argv[1]), connection)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's own teardown takes seconds and has nothing to save


if __name__ == "__main__":
    main()
