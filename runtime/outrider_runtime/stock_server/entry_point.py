"""The entry point `vllm.general_plugins`. vLLM calls it in every process; nothing happens unless OUTRIDER is set."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OUTRIDER"
STRICT_VARIABLE = "OUTRIDER_STRICT"
_OFF = ("", "0", "false", "no", "off")
_MAKES_CONFIGS = "vllm.engine.arg_utils"
_RUN_DIR, _PLAN_FILE = "OUTRIDER_RUN_DIR", "launch.json"
"""Names of `paths` and `launch`, which are too much to import where nothing happens."""
logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only


def activate() -> None:
    """Take over the engine that this process is going to configure, if the user wants it.

    What is raised here ends `vllm serve`, so only a strict user's SystemExit is.
    """
    if not is_enabled(os.environ) or _MAKES_CONFIGS not in sys.modules or _belongs_to_an_engine(os.environ):
        return
    try:
        from outrider_runtime.stock_server.takeover import install

        install()
    except Exception as error:
        report_absence(f"it cannot be loaded: {type(error).__name__}: {error}")


def report_absence(reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Log why vLLM serves without Outrider. Raises SystemExit if the user wants that to be an error."""
    if is_enabled(environ, STRICT_VARIABLE):
        raise SystemExit(f"Outrider cannot be active, and {STRICT_VARIABLE} is set: {reason}")
    logger.warning("Outrider is not active, and vLLM serves with its own flags alone: %s", reason)


def is_enabled(environ: Mapping[str, str], variable: str = VARIABLE) -> bool:
    return environ.get(variable, "").strip().lower() not in _OFF


def _belongs_to_an_engine(environ: Mapping[str, str]) -> bool:
    """Return whether the engine of this process has its plan: it was started by Outrider, in here or by a parent."""
    run_dir = environ.get(_RUN_DIR, "")
    return run_dir != "" and Path(run_dir, _PLAN_FILE).is_file()
