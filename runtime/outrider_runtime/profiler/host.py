"""The engine process: starts vLLM with Outrider's plugin in this very process and runs the shapes it is asked for.

Started by `remote` as `python -m outrider_runtime.profiler.host FD`. The steps are the plugin's own, with the
controller pinned; only how many proposals each request verifies is ours, written onto the requests before each step,
so that every length is measured whatever the drafter would have found.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from outrider_runtime.identity import device_name
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.driver import Driver
from outrider_runtime.profiler.protocol import Ready
from outrider_runtime.vllm_plugin.arguments import engine_arguments, prepare_vllm
from outrider_runtime.vllm_plugin.launch import LaunchPlan, load_plan


def start_engine(plan: LaunchPlan) -> Any:
    """vLLM's engine as the server starts it, but in this process and synchronous.

    Asynchronous scheduling hides the proposals in the worker; what it saves is time outside the forward passes,
    which the runtime's online correction of the intercept learns.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    prepare_vllm(worker_is_here=True)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(engine_arguments(plan))
    parsed.model = parsed.model_tag
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.async_scheduling = False
    arguments.disable_log_stats = True
    # vLLM's defaults for how much a step holds hang on who asks: these are the server's.
    return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)


def serve(connection: Connection) -> None:
    """Answer until the parent hangs up. What goes wrong is told to the parent, and ends the process."""
    try:
        engine = start_engine(load_plan())
        driver = Driver(engine)
        connection.send(Ready(driver.limits(), driver.pace(), device_name()))
        while True:
            connection.send(driver.visit(connection.recv()))
    except (EOFError, BrokenPipeError):
        return  # the parent is done, or gone
    except BaseException as error:
        connection.send(failures.of_exception(error))
        raise


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    serve(connection)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's own teardown takes seconds and has nothing to save


if __name__ == "__main__":
    main()
