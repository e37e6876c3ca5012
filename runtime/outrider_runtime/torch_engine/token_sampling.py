"""Turns logits into tokens, independently of what else is in the batch.

A token is argmax(log p + Gumbel noise), which is a draw from p (the Gumbel-max trick). The noise is a function of the
request's seed, the position and the token, so a request gets the same answer with any drafter, any draft length, in any
batch and after a preemption. A drafter uses the target's noise too: if its p is the target's, it draws the same token.
The exception is a chain for a request without a seed, which `rejection` will judge: it is drawn with independent noise.
Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider_runtime.torch_engine.engine_request import Request, Sampling, TokenHistory
from outrider_runtime.torch_engine.seeded_noise import Noise, gumbel


class Row(NamedTuple):
    """A row of logits from which one token is drawn."""

    sampling: Sampling
    place: int
    """The token's position in the request."""
    noise: Noise = Noise.TARGET
    history: TokenHistory = TokenHistory()
    """The request's token counts; read for penalties only."""
    ahead: Sequence[int] = ()
    """Proposed tokens between the request's last token and this one; penalties count them too."""


def describe_draw(request: Request, ahead: Sequence[int], noise: Noise = Noise.TARGET) -> Row:
    """Describe the draw of the token that follows the request's tokens and the proposed tokens `ahead`."""
    place = len(request.tokens) + len(ahead)
    if request.sampling.has_raw_logits:
        return Row(request.sampling, place, noise)
    request.history.catch_up(request.tokens, request.prompt_tokens)
    return Row(request.sampling, place, noise, request.history, ahead)


def draw(weights: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw a token for each row. weights: (R, V), from `weights_of`."""
    tokens: list[int] = _with_noise(weights, rows).argmax(-1).tolist()
    return tokens


class Likeliest(NamedTuple):
    """The w tokens that the target is most likely to draw for each row, by a drafter's logits; the best first."""

    logprobs: Tensor
    """(R, w)"""
    tokens: Tensor
    """(R, w)"""
    drawn_from: Tensor | None = None
    """(R, V): the probabilities that first tokens were drawn with; None unless a row has `Noise.DRAFT`."""


def likeliest(logits: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
    """Rank tokens by a drafter's logits, (R, V), plus the noise that the target will draw with.

    The softmax of these scores estimates the probability that the target draws each token.
    """
    weights = compute_weights(logits, rows)
    scores = _with_noise(weights, rows)  # (R, V)
    best = scores.topk(min(width, scores.shape[-1]))  # (R, w)
    is_drawn = any(row.noise is Noise.DRAFT for row in rows)
    return Likeliest(
        best.values - scores.logsumexp(-1, keepdim=True), best.indices, weights.softmax(-1) if is_drawn else None
    )


def likeliest_among(logits: Tensor, tokens: Tensor, size: int, rows: Sequence[Row], width: int) -> Likeliest:
    """Rank tokens for a drafter whose vocabulary is a part of the target's.

    logits: (R, V'). tokens: (V',), the target's number of each token. size: V, the target's vocabulary.
    """
    if all(row.sampling.temperature == 0 and row.sampling.has_raw_logits for row in rows):
        best = likeliest(logits, rows, width)
        return Likeliest(best.logprobs, tokens[best.tokens])
    all_logits = logits.new_full((len(rows), size), -torch.inf)  # (R, V)
    all_logits[:, tokens] = logits
    return likeliest(all_logits, rows, width)


def compute_weights(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Apply biases, penalties, temperature and truncation: (R, V), unnormalised log-probabilities of the draws.

    The result is float64 if any row is sampled; rows at temperature 0 keep their adjusted logits.
    """
    logits = _adjust_rows(logits, rows)
    rows_by_setting: dict[tuple[float, int, float, float], list[int]] = {}  # so that each setting is one operation
    for number in _list_sampled(rows):
        sampling = rows[number].sampling
        setting = (sampling.temperature, sampling.top_k, sampling.min_p, sampling.top_p)
        rows_by_setting.setdefault(setting, []).append(number)
    logits = logits.double() if rows_by_setting else logits
    for numbers in rows_by_setting.values():
        sampling = rows[numbers[0]].sampling
        logits[numbers] = _truncate(logits[numbers] / sampling.temperature, sampling)
    return logits


def _with_noise(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """Add Gumbel noise to sampled rows: (R, V) scores, of which the highest is the token that is drawn."""
    numbers = _list_sampled(rows)
    if not numbers:
        return weights
    seeds = [rows[number].sampling.seed + rows[number].noise for number in numbers]
    places = [rows[number].place for number in numbers]
    scores = weights.clone()
    scores[numbers] += gumbel(seeds, places, weights.shape[-1], weights.device)
    return scores


def _list_sampled(rows: Sequence[Row]) -> list[int]:
    """List the rows that are not greedy."""
    return [number for number, row in enumerate(rows) if row.sampling.temperature > 0]


def _adjust_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Apply biases and penalties to a copy of the logits, (R, V)."""
    special = [number for number, row in enumerate(rows) if not row.sampling.has_raw_logits]
    if special:
        logits = logits.clone()
        histories = dict[int, _HistoryTensors]()  # by request, which may have several rows
        for number in special:
            row = rows[number]
            if id(row.history) not in histories:
                histories[id(row.history)] = _to_tensors(row.history, logits)
            _adjust(logits[number], row, histories[id(row.history)])
    return logits


class _HistoryTensors(NamedTuple):
    """A request's token counts on the logits' device."""

    distinct: Tensor
    """Distinct tokens of prompt and answer."""
    answer: Tensor
    """Distinct tokens of the answer."""
    counts: Tensor
    """Occurrences of each token of `answer`."""


def _to_tensors(history: TokenHistory, logits: Tensor) -> _HistoryTensors:
    def tensor(values: Iterable[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device)

    return _HistoryTensors(
        distinct=tensor(history.distinct, torch.int64),
        answer=tensor(history.counts, torch.int64),
        counts=tensor(history.counts.values(), logits.dtype),
    )


def _adjust(logits: Tensor, row: Row, history: _HistoryTensors) -> None:
    """Apply biases, then penalties, to one row's logits, (V,), in place; the order is vLLM's."""
    sampling = row.sampling
    ahead = Counter(row.ahead)
    if sampling.logit_bias:
        _add(logits, sampling.logit_bias)
    if sampling.repetition_penalty != 1.0:
        new = torch.tensor([token for token in ahead if token not in row.history.distinct], dtype=torch.int64)
        for tokens in (history.distinct, new.to(logits.device)):
            _penalise_repetition(logits, tokens, sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        logits[history.answer] -= sampling.frequency_penalty * history.counts + sampling.presence_penalty
        _add(logits, {
            token: -sampling.frequency_penalty * count - sampling.presence_penalty * (token not in row.history.counts)
            for token, count in ahead.items()
        })  # fmt: skip


def _add(logits: Tensor, amounts: Mapping[int, float]) -> None:
    """Add to the logits, (V,), of some tokens, in place."""
    tokens = torch.tensor(list(amounts), dtype=torch.int64, device=logits.device)
    logits[tokens] += torch.tensor(list(amounts.values()), dtype=logits.dtype, device=logits.device)


def _penalise_repetition(logits: Tensor, tokens: Tensor, penalty: float) -> None:
    """Divide positive logits of `tokens` by the penalty and multiply negative ones by it, in place."""
    values = logits[tokens]
    logits[tokens] = values * torch.where(values > 0, 1 / penalty, penalty)


def _truncate(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Set tokens that top-k, min-p or top-p excludes to -inf. scaled: (R, V), logits / temperature."""
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
    """Log-probabilities (natural) of one token of an answer, before temperature and penalties."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    top: dict[int, float]
    """The most probable tokens -> their log-probabilities, in descending order."""


def report_logprobs(logits: Tensor, token: int, top_tokens: int) -> TokenLogprobs:
    """Report a token's log-probability and the `top_tokens` most probable tokens. logits: (V,), the target's own."""
    logprobs = logits.float().log_softmax(-1)  # (V,)
    logprob = logprobs[token]
    top = dict[int, float]()
    if top_tokens:
        best = logprobs.topk(min(top_tokens, len(logprobs)))
        top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(float(logprob), int((logprobs > logprob).sum()) + 1, top)
