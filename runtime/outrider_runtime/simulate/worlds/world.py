"""Step times of a target and its drafters on one kind of hardware."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from outrider_runtime.simulate.data import FOLDER
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.worlds import coefficients
from outrider_runtime.simulate.worlds.tables import Curve, ModelTables, curve, from_document

WORLDS = FOLDER / "worlds"


BLOCK_LAYERS = 5
"""Layers of a block drafter; published ones for targets of 4B to 32B have 5 to 8."""
BLOCK_FEEDING = 2.5
"""Bytes of weights that feeding a block drafter reads / those of an EAGLE-3 head's fusion of three hidden states. For a
target of width 4,096: 252 MB (a projection of five hidden states, keys and values of five layers) / 101 MB."""


class DrafterKind(StrEnum):
    HEAD = "head"
    """Reads the target's hidden states; a pass for each token (EAGLE)."""
    MODEL = "model"
    """A language model with a cache of its own; a pass for each token."""
    SPARSE = "sparse"
    """The target itself over part of its own cache; a pass for each token, of the context that it reads."""
    LOOKUP = "lookup"
    """One call on the CPU, however long the proposal."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one forward pass."""

    tokens: int
    """Batched tokens, prompts included."""
    requests: int
    """Decoding requests, with 1 or more tokens each."""
    context: float
    """Mean number of cached tokens of decoding requests."""
    logits: int
    """Tokens whose logits are needed."""
    prompts: Sequence[tuple[int, int]] = ()
    """(chunk, tokens before it) of each prefill in the pass."""
    uniform: bool = True
    """Whether all decoding requests have the same number of tokens."""
    whole_context: float | None = None
    """Mean number of cached tokens, read or not, for a pass over a window; None: all are read."""

    @property
    def queries(self) -> float:
        """Mean number of tokens of a decoding request in the pass."""
        prompts = sum(chunk for chunk, _ in self.prompts)
        return (self.tokens - prompts) / self.requests if self.requests else 1.0

    def later(self, width: int) -> Pass:
        """Return a draft's later pass, with `width` nodes of each decoding request."""
        tokens = width * self.requests
        return Pass(tokens, self.requests, self.context, tokens, whole_context=self.whole_context)


@dataclass(frozen=True, slots=True)
class Launch:
    """Time of a pass in addition to its kernels, in milliseconds."""

    always: float
    prompts: float
    """Added if the pass has a prefill."""
    sampling: float
    sampling_token: float
    """Added for each token with logits."""
    varlen: float = 0.0
    """Added if decoding requests have different numbers of tokens, and the pass has no prefill."""

    def ms(self, work: Pass) -> float:
        varlen = self.varlen if work.requests and not work.uniform else 0.0
        pieces = self.prompts if work.prompts else varlen
        return self.always + pieces + self.sampling + self.sampling_token * work.logits


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """Times of a model's passes."""

    tables: ModelTables
    launch: Launch
    further_query: float = 0.0
    """Attention of a further token of a request / attention of its first one; small, as keys are read once."""
    by_whole_context: bool = False
    """Whether its tables are over `Pass.whole_context`."""

    def ms(self, work: Pass, tokens: int) -> float:
        """Return milliseconds of a pass. tokens: batched tokens, with the padding of a CUDA graph."""
        return self.layers_ms(work, tokens, 1)

    def layers_ms(self, work: Pass, tokens: int, times: int) -> float:
        """Return milliseconds of a model with `times` the number of layers."""
        tables = self.tables
        attention = sum(tables.prefill_attention(chunk, prefix) for chunk, prefix in work.prompts)
        if work.requests:
            context = work.context
            if self.by_whole_context and work.whole_context is not None:
                context = work.whole_context
            further = 1 + self.further_query * (work.queries - 1)
            attention += further * tables.decode_attention(work.requests, context)
            if tables.further_token is not None:
                attention += (work.queries - 1) * work.requests * tables.further_token(work.requests, context)
        logits = tables.logits(work.logits) if work.logits else 0.0
        return times * (tables.tokens(tokens) + attention) + logits + self.launch.ms(work)


class TargetTimes(Protocol):
    def ms(self, work: Pass, tokens: int) -> float: ...


class DrafterTimes(Protocol):
    def ms(self, first: Pass, passes: int, width: int = 1) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """An autoregressive drafter. Its first pass runs over the tokens that it is fed, each other one over a depth."""

    forward: Forward
    fusion: Curve | None = None
    """Extra time of a head's first pass."""

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:
        once = self.forward.ms(first, padded_tokens(first)) + (self.fusion(first.tokens) if self.fusion else 0.0)
        later = first.later(width)
        return once + max(0, passes - 1) * self.forward.ms(later, padded_tokens(later))


@dataclass(frozen=True, slots=True, eq=False)
class BlockPass:
    """A block drafter, composed from an EAGLE head of its target.

    Feeding it costs `BLOCK_FEEDING` times the extra time of a head's first pass. One pass over a block of each request
    proposes any number of tokens.
    """

    head: Passes
    tokens: int
    """Tokens of a request in the pass."""

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:  # noqa: ARG002
        fed_ms = BLOCK_FEEDING * self.head.fusion(first.tokens) if self.head.fusion else 0.0
        block = first.later(self.tokens)
        return fed_ms + (self.head.forward.layers_ms(block, padded_tokens(block), BLOCK_LAYERS) if passes else 0.0)


@dataclass(frozen=True, slots=True)
class Lookup:
    constant_ms: float
    request_ms: float

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:  # noqa: ARG002
        return self.constant_ms + self.request_ms * first.requests


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """Step times of one deployment."""

    name: str
    origin: str
    """Origin of the times: composed, measured or rows."""
    model: str
    device: str
    gpus: int
    source: str
    derived: tuple[str, ...]
    """Parts that were not measured, in sentences."""
    kv_tokens: int
    graph_tokens: int | None
    """Batched tokens of the largest CUDA graph; None: no graphs."""
    target: TargetTimes
    drafters: Mapping[str, DrafterTimes]
    takes_any_lengths: bool
    """Whether steps of unequal lengths cost no more than uniform ones, so that the device may choose them."""

    def target_s(self, work: Pass) -> float:
        """Return seconds of the target's pass, sampling included."""
        return self.target.ms(work, self._tokens(work)) / 1e3

    def draft_s(self, drafter: str, first: Pass, passes: int, width: int = 1) -> float:
        """Return seconds of a drafter with first pass `first` and `passes` depths; 0: only its first pass."""
        return self.drafters[drafter].ms(first, passes, width) / 1e3

    def _tokens(self, work: Pass) -> int:
        fits = self.graph_tokens is not None and work.tokens <= self.graph_tokens
        return padded_tokens(work) if fits else work.tokens


def padded_tokens(work: Pass) -> int:
    """Return the tokens of the smallest graph that holds the pass: 1, 2, 4, multiples of 8 to 256, then of 16."""
    tokens = work.tokens
    if tokens <= 2 or work.prompts:
        return tokens
    if tokens <= 4:
        return 4
    size = 8 if tokens <= 256 else 16
    return -(-tokens // size) * size


def world_names() -> list[str]:
    return sorted(path.stem for path in WORLDS.glob("*.json"))


def load(name: str) -> World:
    """Load a shipped world. Raises SimulationError, which lists the shipped ones, for an unknown name."""
    if name not in world_names():
        raise SimulationError(f"{name} is no file, and no world is called so; known are {', '.join(world_names())}")
    return parse_world(json.loads((WORLDS / f"{name}.json").read_text(encoding="utf-8")))


def parse_world(document: Mapping[str, Any]) -> World:
    parts = document["drafters"]
    if document["origin"] == "measured":
        target: TargetTimes = coefficients.target(document["target"], document["graphTokens"])
        drafters: dict[str, DrafterTimes] = {name: coefficients.drafter(part) for name, part in parts.items()}
    else:
        target = forward = _forward(document["target"])
        drafters = {name: _drafter(part, forward) for name, part in parts.items()}
    return World(
        name=document["name"],
        origin=document["origin"],
        model=document["model"],
        device=document["device"],
        gpus=document["gpus"],
        source=document["source"],
        derived=tuple(document["derived"]),
        kv_tokens=document["kvTokens"],
        graph_tokens=document["graphTokens"],
        target=target,
        drafters=drafters,
        takes_any_lengths=_takes_any_lengths(document),
    )


def _takes_any_lengths(document: Mapping[str, Any]) -> bool:
    """Return whether varlen steps cost no more; a profile of an engine with graphs does not say so."""
    if document["origin"] == "composed":
        return not document["target"].get("varlenLaunchMs")
    return document["graphTokens"] is None


def _forward(part: Mapping[str, Any]) -> Forward:
    sampling, per_token = part["samplingMs"]
    launch = Launch(
        part["launchMs"], part.get("promptLaunchMs", 0.0), sampling, per_token, part.get("varlenLaunchMs", 0.0)
    )
    return Forward(
        from_document(part), launch, part.get("furtherQuery", 0.0), by_whole_context=part.get("byWholeContext", False)
    )


def _drafter(part: Mapping[str, Any], target: Forward) -> DrafterTimes:
    kind = DrafterKind(part["kind"])
    if kind is DrafterKind.LOOKUP:
        return Lookup(part["constantMs"], part["perRequestMs"])
    if kind is DrafterKind.SPARSE:
        return Passes(target)
    fusion = part.get("fusion")
    return Passes(_forward(part), curve(**fusion) if fusion else None)
