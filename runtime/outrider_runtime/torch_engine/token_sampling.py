"""From the target's logits to tokens, the same whatever else shares the pass.

A token is argmax(log p + Gumbel noise), which is a draw from p (Gumbel-max). The noise is a function of the request's
seed, the token's place and the token itself, so a request gets the same answer with any drafter, any draft length, in
any batch and after a preemption. A drafter draws with the target's noise: where both think alike, they draw alike. Only
what `rejection` will judge, a chain for a request without a seed, is drawn with noise of its own.
Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider_runtime.torch_engine.engine_request import Request, Sampling, TokenHistory
from outrider_runtime.torch_engine.seeded_noise import Noise, gumbel


class Row(NamedTuple):
    """A place for which a token is drawn."""

    sampling: Sampling
    place: int
    """The token's position in the request."""
    noise: Noise = Noise.TARGET
    history: TokenHistory = TokenHistory()
    """Of the request; read for penalties only."""
    ahead: Sequence[int] = ()
    """Proposals on the way to the place, which go on with that history."""


def row_of(request: Request, ahead: Sequence[int], noise: Noise = Noise.TARGET) -> Row:
    """Of the token behind all of the request's and those `ahead`, which are proposed."""
    place = len(request.tokens) + len(ahead)
    if request.sampling.is_plain:
        return Row(request.sampling, place, noise)
    request.history.catch_up(request.tokens, request.prompt)
    return Row(request.sampling, place, noise, request.history, ahead)


def draw(weights: Tensor, rows: Sequence[Row]) -> list[int]:
    """(R, V), as `weights_of` makes them, to a token for each row."""
    tokens: list[int] = _with_noise(weights, rows).argmax(-1).tolist()
    return tokens


class Likeliest(NamedTuple):
    """The tokens that a row's request would draw first, as far as a drafter can tell; (R, w) each, the best first."""

    logprobs: Tensor
    tokens: Tensor
    drawn_from: Tensor | None = None
    """(R, V), where the first token is a draw, with noise of the draft's own: the probabilities that it comes from."""


def likeliest(logits: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
    """Of a drafter's logits (R, V), with the noise that the target will draw with: how probable it is that the target
    scores each token highest."""
    weights = weights_of(logits, rows)
    scores = _with_noise(weights, rows)
    best = scores.topk(min(width, scores.shape[-1]))
    is_drawn = any(row.noise is Noise.DRAFT for row in rows)
    return Likeliest(
        best.values - scores.logsumexp(-1, keepdim=True), best.indices, weights.softmax(-1) if is_drawn else None
    )


def likeliest_among(logits: Tensor, tokens: Tensor, size: int, rows: Sequence[Row], width: int) -> Likeliest:
    """The same of a drafter that knows some tokens alone. logits (R, V'), tokens (V',): of the target's `size`."""
    if all(row.sampling.temperature == 0 and row.sampling.is_plain for row in rows):
        own = likeliest(logits, rows, width)
        return Likeliest(own.logprobs, tokens[own.tokens])
    everything = logits.new_full((len(rows), size), -torch.inf)
    everything[:, tokens] = logits
    return likeliest(everything, rows, width)


def weights_of(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """(R, V): logarithms of what a row's tokens are drawn by; float64 where any row is not greedy."""
    logits = _adjusted(logits, rows)
    alike: dict[tuple[float, int, float, float], list[int]] = {}
    for number in _sampled(rows):
        own = rows[number].sampling
        alike.setdefault((own.temperature, own.top_k, own.min_p, own.top_p), []).append(number)
    logits = logits.double() if alike else logits
    for numbers in alike.values():
        sampling = rows[numbers[0]].sampling
        logits[numbers] = _truncated(logits[numbers] / sampling.temperature, sampling)
    return logits


def _with_noise(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """(R, V): the token of the highest score is drawn."""
    numbers = _sampled(rows)
    if not numbers:
        return weights
    some = [rows[number] for number in numbers]
    seeds, places = [one.sampling.seed + one.noise for one in some], [one.place for one in some]
    scores = weights.clone()
    scores[numbers] += gumbel(seeds, places, weights.shape[-1], weights.device)
    return scores


def _sampled(rows: Sequence[Row]) -> list[int]:
    return [number for number, row in enumerate(rows) if row.sampling.temperature > 0]


def _adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """With biases and penalties; the logits that came in stay as they are."""
    special = [number for number, row in enumerate(rows) if not row.sampling.is_plain]
    if special:
        logits = logits.clone()
        seen = dict[int, _Seen]()  # once a request, whatever its rows
        for number in special:
            row = rows[number]
            if id(row.history) not in seen:
                seen[id(row.history)] = _seen(row.history, logits)
            _adjust(logits[number], row, seen[id(row.history)])
    return logits


class _Seen(NamedTuple):
    """A history as tensors."""

    distinct: Tensor
    answer: Tensor
    """Distinct tokens of the answer."""
    times: Tensor
    """How often each is in it."""


def _seen(history: TokenHistory, logits: Tensor) -> _Seen:
    distinct, answer, times = (
        torch.tensor(list(some), dtype=dtype, device=logits.device)
        for some, dtype in (
            (history.distinct, torch.int64), (history.counts, torch.int64), (history.counts.values(), logits.dtype),
        )
    )  # fmt: skip
    return _Seen(distinct, answer, times)


def _adjust(logits: Tensor, row: Row, seen: _Seen) -> None:
    """(V,) of one row, in place: biases, then penalties, in vLLM's order."""
    sampling, ahead = row.sampling, Counter(row.ahead)
    if sampling.logit_bias:
        _add(logits, sampling.logit_bias)
    if sampling.repetition_penalty != 1.0:
        new = torch.tensor([one for one in ahead if one not in row.history.distinct], dtype=torch.int64)
        for tokens in (seen.distinct, new.to(logits.device)):
            _repeat(logits, tokens, sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        logits[seen.answer] -= sampling.frequency_penalty * seen.times + sampling.presence_penalty
        _add(logits, {
            token: -sampling.frequency_penalty * times - sampling.presence_penalty * (token not in row.history.counts)
            for token, times in ahead.items()
        })  # fmt: skip


def _add(logits: Tensor, amounts: Mapping[int, float]) -> None:
    tokens = torch.tensor(list(amounts), dtype=torch.int64, device=logits.device)
    logits[tokens] += torch.tensor(list(amounts.values()), dtype=logits.dtype, device=logits.device)


def _repeat(logits: Tensor, tokens: Tensor, penalty: float) -> None:
    values = logits[tokens]
    logits[tokens] = values * torch.where(values > 0, 1 / penalty, penalty)


def _truncated(scaled: Tensor, sampling: Sampling) -> Tensor:
    """(R, V) with -inf for tokens that top-k, top-p or min-p leaves out."""
    if 0 < sampling.top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.min_p > 0:
        probabilities = scaled.softmax(-1)
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        scaled = scaled.masked_fill(probabilities < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, tokens = scaled.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        ordered[probabilities.cumsum(-1) - probabilities >= max(sampling.top_p, 1e-9)] = -torch.inf
        scaled = torch.empty_like(scaled).scatter_(1, tokens, ordered)
    return scaled


class TokenLogprobs(NamedTuple):
    """What is told of one token of an answer: natural logarithms, before temperature and penalties."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    top: dict[int, float]
    """The most probable tokens, the first of them first."""


def logprobs_of(logits: Tensor, token: int, most: int) -> TokenLogprobs:
    """logits: (V,), the target's own."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs[token]
    top = logprobs.topk(min(most, len(logprobs))) if most else None
    told = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(float(own), int((logprobs > own).sum()) + 1, told)
