"""A target with its drafters on one kind of hardware: seconds of each part of an engine step."""

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
"""Layers of a block draft: what is published for targets of 4B to 32B has 5 to 8."""


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
    """What a forward pass processes."""

    tokens: int
    """Batched tokens, prompts included."""
    requests: int
    """That decode, with 1 or more tokens each."""
    context: float
    """Cached tokens of those, on average."""
    logits: int
    """Tokens whose logits are needed."""
    prompts: Sequence[tuple[int, int]] = ()
    """Chunk, and the tokens before it, of each prompt in the pass."""
    even: bool = True
    """Every request that decodes has as many tokens."""
    whole_context: float | None = None
    """Of a pass over a window: cached tokens of those requests, read or not, on average. None: all are read."""

    @property
    def queries(self) -> float:
        """Tokens of a request that decodes, on average."""
        prompts = sum(chunk for chunk, _ in self.prompts)
        return (self.tokens - prompts) / self.requests if self.requests else 1.0

    def later(self, width: int) -> Pass:
        """A draft's later pass: `width` nodes of each request that decodes."""
        tokens = width * self.requests
        return Pass(tokens, self.requests, self.context, tokens, whole_context=self.whole_context)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a pass costs beside its kernels, in milliseconds."""

    always: float
    prompts: float
    """More where a prompt is in the pass."""
    sampling: float
    sampling_token: float
    """For each token with logits."""
    varlen: float = 0.0
    """More where requests that decode have unequal numbers of tokens, and no prompt is in the pass."""

    def ms(self, one: Pass) -> float:
        apart = self.varlen if one.requests and not one.even else 0.0
        pieces = self.prompts if one.prompts else apart
        return self.always + pieces + self.sampling + self.sampling_token * one.logits


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A model's passes."""

    tables: ModelTables
    launch: Launch
    further_query: float = 0.0
    """Attention of one more token of a request, as a share of its first one's: keys are read once."""
    by_whole_context: bool = False
    """Its times are by `Pass.whole_context`."""

    def ms(self, one: Pass, tokens: int) -> float:
        """`tokens`: with the padding of a graph."""
        return self.layers_ms(one, tokens, 1)

    def layers_ms(self, work: Pass, tokens: int, times: int) -> float:
        """Milliseconds of a model that has so many times the layers."""
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
    def ms(self, one: Pass, tokens: int) -> float: ...


class DrafterTimes(Protocol):
    def ms(self, first: Pass, passes: int, width: int = 1) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """A drafter whose every depth is a pass: the first over what it is fed, the others over a depth of each request's
    tree."""

    forward: Forward
    fusion: Curve | None = None
    """Of a head: what its first pass costs beyond a pass."""

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:
        once = self.forward.ms(first, padded(first)) + (self.fusion(first.tokens) if self.fusion else 0.0)
        later = first.later(width)
        return once + max(0, passes - 1) * self.forward.ms(later, padded(later))


@dataclass(frozen=True, slots=True, eq=False)
class BlockPass:
    """A block drafter, from an EAGLE head of its target: it is fed what a head's first pass costs beyond a pass, and
    one pass over the whole block of each request proposes any number of tokens."""

    head: Passes
    tokens: int
    """Tokens of a request in the pass."""

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:  # noqa: ARG002
        fed_ms = self.head.fusion(first.tokens) if self.head.fusion else 0.0
        block = first.later(self.tokens)
        return fed_ms + (self.head.forward.layers_ms(block, padded(block), BLOCK_LAYERS) if passes else 0.0)


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
    """composed, measured or rows."""
    model: str
    device: str
    gpus: int
    source: str
    derived: tuple[str, ...]
    """What was not measured, in sentences."""
    kv_tokens: int
    graph_tokens: int | None
    """Largest pass that a graph runs, padded to its size; None: no graphs."""
    target: TargetTimes
    drafters: Mapping[str, DrafterTimes]
    takes_any_lengths: bool
    """Whether steps of unequal lengths cost no more than uniform ones, so that the device may choose them."""

    def target_s(self, one: Pass) -> float:
        """Seconds of the target's pass, sampling included."""
        return self.target.ms(one, self._tokens(one)) / 1e3

    def draft_s(self, drafter: str, first: Pass, passes: int, width: int = 1) -> float:
        """Seconds of a drafter that is fed `first` and proposes trees of `passes` depths; 0: its first pass alone."""
        return self.drafters[drafter].ms(first, passes, width) / 1e3

    def _tokens(self, one: Pass) -> int:
        fits = self.graph_tokens is not None and one.tokens <= self.graph_tokens
        return padded(one) if fits else one.tokens


def padded(one: Pass) -> int:
    """Tokens of the smallest captured graph that holds the pass: 1, 2, 4, eights to 256, sixteens beyond (vLLM)."""
    tokens = one.tokens
    if tokens <= 2 or one.prompts:
        return tokens
    if tokens <= 4:
        return 4
    size = 8 if tokens <= 256 else 16
    return -(-tokens // size) * size


def known() -> list[str]:
    return sorted(path.stem for path in WORLDS.glob("*.json"))


def load(name: str) -> World:
    """One that ships. Raises SimulationError with the names of those that do."""
    if name not in known():
        raise SimulationError(f"{name} is no file, and no world is called so; known are {', '.join(known())}")
    return parsed(json.loads((WORLDS / f"{name}.json").read_text(encoding="utf-8")))


def parsed(document: Mapping[str, Any]) -> World:
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
    """A profile does not say so of an engine with graphs."""
    if document["origin"] == "composed":
        return not document["target"].get("varlenLaunchMs")
    return document["graphTokens"] is None


def _forward(part: Mapping[str, Any]) -> Forward:
    sampling, each = part["samplingMs"]
    launch = Launch(part["launchMs"], part.get("promptLaunchMs", 0.0), sampling, each, part.get("varlenLaunchMs", 0.0))
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
