"""The entry point `vllm.general_plugins`. vLLM calls it in every process; nothing happens unless OUTRIDER is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OUTRIDER"
_OFF = ("", "0", "false", "no", "off")
_MAKES_CONFIGS = "vllm.engine.arg_utils"
_RUN_DIR, _PLAN_FILE = "OUTRIDER_RUN_DIR", "launch.json"
"""Names of `paths` and `launch`, which are too much to import where nothing happens."""


def activate() -> None:
    """Take over the engine that this process is going to configure, if the user wants it."""
    if is_enabled(os.environ) and _MAKES_CONFIGS in sys.modules and not _belongs_to_an_engine(os.environ):
        from outrider_runtime.stock_server.takeover import install

        install()


def is_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get(VARIABLE, "").strip().lower() not in _OFF


def _belongs_to_an_engine(environ: Mapping[str, str]) -> bool:
    """Return whether the engine of this process has its plan: it was started by Outrider, in here or by a parent."""
    return Path(environ.get(_RUN_DIR, ""), _PLAN_FILE).is_file()
