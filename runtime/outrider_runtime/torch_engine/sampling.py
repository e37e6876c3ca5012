"""From the target's logits to tokens, the same whatever else shares the pass.

A token is argmax(log p + Gumbel noise), which is a draw from p (Gumbel-max). The noise is a function of the request's
seed, the token's place and the token itself, so a request gets the same answer with any drafter, any draft length, in
any batch and after a preemption. A drafter draws with the target's noise: where both think alike, they draw alike. Only
what `rejection` will judge, a chain for a request without a seed, is drawn with noise of its own.
Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider_runtime.torch_engine.noise import Noise, gumbel
from outrider_runtime.torch_engine.requests import Request, Sampling


class Row(NamedTuple):
    """A place for which a token is drawn."""

    sampling: Sampling
    place: int
    """The token's position in the request."""
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    """The answer up to here, proposals on the way included; read for penalties only."""
    noise: Noise = Noise.TARGET


def row_of(request: Request, ahead: Sequence[int], noise: Noise = Noise.TARGET) -> Row:
    """Of the token behind all of the request's and those `ahead`, which are proposed."""
    place = len(request.tokens) + len(ahead)
    if request.sampling.is_plain:
        return Row(request.sampling, place, noise=noise)
    return Row(request.sampling, place, request.tokens[: request.prompt], [*request.answer, *ahead], noise)


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
        for number in special:
            _adjust(logits[number], rows[number])
    return logits


def _adjust(logits: Tensor, row: Row) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=logits.device)
        values = logits[seen]
        factor = torch.where(values > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits[seen] = values * factor
    if row.answer and (sampling.frequency_penalty or sampling.presence_penalty):
        counts = Counter(row.answer)
        tokens = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[tokens] -= sampling.frequency_penalty * times + sampling.presence_penalty
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device)


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
    top = logprobs.topk(most) if most else None
    told = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(float(own), int((logprobs > own).sum()) + 1, told)
