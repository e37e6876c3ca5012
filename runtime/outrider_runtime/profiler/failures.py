"""Classifies why something could not be measured: a reason for the condition and a sentence for the user."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from outrider_crds.profile import HUB_UNAVAILABLE, ProfilingFailure

from outrider_runtime.profiler.host_protocol import EngineFailure

MODEL_NOT_FOUND = "ModelNotFound"
VOCABULARY_MISMATCH = "VocabularyMismatch"
DRAFTER_FAILED = "DrafterFailed"
OUT_OF_MEMORY = "OutOfMemory"
ENGINE_FAILED = "EngineFailed"
NOISY = "Noisy"
TIME_BUDGET_TOO_SMALL = "TimeBudgetTooSmall"

MESSAGE_LIMIT = 400
"""Characters of a message: the failures of eight drafters must fit into a termination message of 4096 bytes."""
_MEMORY = ("out of memory", "no available memory", "not enough memory", "cannot allocate memory", "kv cache space")
_MEMORY_KINDS = ("OutOfMemoryError", "MemoryError")
_HUB_AWAY_WORDS = (
    "server error '5",
    "503 server error",
    "couldn't connect to",
    "cannot find an appropriate cached snapshot",
    "temporary failure in name resolution",
)
"""Words of the hub's client, of requests and of transformers."""
_HUB_AWAY_KINDS = ("ConnectError", "ConnectTimeout", "ReadTimeout", "RemoteProtocolError", "LocalEntryNotFoundError")
_MISSING = (
    "is not a valid model identifier",
    "does not appear to have a file named",
    "cannot be downloaded from the hub",
    "no such file or directory",
    "repository not found",
    "has no config.json",
    "cannot find any model weights",
)


class ProfilingError(Exception):
    """A part of the profile cannot be measured; has the reason and the message for the result."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def failure(reason: str, message: str, drafter: str = "") -> ProfilingFailure:
    """Return the failure as the result reports it, with its message on one line and cut to `MESSAGE_LIMIT`."""
    text = " ".join(message.split())
    if len(text) > MESSAGE_LIMIT:
        text = f"{text[: MESSAGE_LIMIT - 4]} ..."
    return ProfilingFailure(reason=reason, message=text, drafter=drafter)


def classify_exception(error: BaseException) -> EngineFailure:
    """Return the failure for an exception that an engine raised while it started or ran."""
    kinds = {type(e).__name__ for e in _chain(error)}
    text = " / ".join(dict.fromkeys(str(e).strip() or type(e).__name__ for e in _chain(error)))
    return EngineFailure(_reason(text, kinds), f"{type(error).__name__}: {text}")


def classify_exit(exit_code: int | None, last_lines: str) -> EngineFailure:
    """Return the failure for an engine process that ended without reporting an error."""
    if exit_code == -signal.SIGKILL:
        text = (
            "the engine process was killed, most likely because it ran out of memory; raise "
            "podTemplate.resources.limits.memory"
        )
        return EngineFailure(OUT_OF_MEMORY, text)
    return EngineFailure(
        _reason(last_lines, ()), f"the engine process ended with code {exit_code}; its last lines: {last_lines}"
    )


def classify_obstacle(sentence: str) -> str:
    """Return the reason for a drafter that the engine cannot load, from the message of the pool's check."""
    if sentence.startswith("vocabulary mismatch"):
        return VOCABULARY_MISMATCH
    reason = _reason(sentence, ())
    return reason if reason in (MODEL_NOT_FOUND, HUB_UNAVAILABLE) else DRAFTER_FAILED


def _reason(text: str, kinds: Iterable[str]) -> str:
    lower = text.lower()
    if any(kind in _MEMORY_KINDS for kind in kinds) or any(phrase in lower for phrase in _MEMORY):
        return OUT_OF_MEMORY
    if any(kind in _HUB_AWAY_KINDS for kind in kinds) or any(words in lower for words in _HUB_AWAY_WORDS):
        return HUB_UNAVAILABLE
    return MODEL_NOT_FOUND if any(phrase in lower for phrase in _MISSING) else ENGINE_FAILED


def _chain(error: BaseException) -> Iterable[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
