"""vLLM's requests as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from outrider_runtime.control.batch import Ints
from outrider_runtime.loop.stepper import View


def view(requests: Sequence[Request]) -> View:
    known = _column([request.num_tokens for request in requests])
    context = _column([request.num_computed_tokens for request in requests])
    in_flight = _column([request.num_output_placeholders for request in requests])
    return View(
        names=[request.request_id for request in requests],
        context=context,
        known=known,
        todo=np.maximum(0, known + in_flight - context),
        emitted=_column([request.num_output_tokens for request in requests]),
    )


def view_of_step(requests: Mapping[str, Request], names: Sequence[str], seen: View | None) -> View:
    """Return the view of a step that was just scheduled.

    seen: the view before vLLM scheduled the step, which changes no column of a running request. If its requests are the
    step's first ones, only the others are read.
    """
    if seen is None or seen.names != names[: len(seen.names)]:
        return view([requests[name] for name in names])
    if len(seen.names) == len(names):
        return seen
    new = view([requests[name] for name in names[len(seen.names) :]])
    return View(
        names, np.concatenate((seen.context, new.context)), np.concatenate((seen.known, new.known)),
        np.concatenate((seen.todo, new.todo)), np.concatenate((seen.emitted, new.emitted)),
    )  # fmt: skip


def proposed(requests: Sequence[Request]) -> Ints:
    """(N,): pending proposals, or placeholders for them."""
    return _column([len(request.spec_token_ids) for request in requests])


def scheduled(output: SchedulerOutput) -> tuple[Ints, Ints]:
    """Return two columns (N,) over a step's requests, in their order: tokens, and proposals among them."""
    counts, proposals = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    verified = [len(proposals.get(name, ())) for name in counts] if proposals else [0] * len(counts)
    return _column(list(counts.values())), _column(verified)


def limit(request: Request, max_model_len: int) -> int:
    """Return the tokens, prompt included, at which the request ends; 0 for a request sampled with a seed.

    With 0 nothing is proposed for it. A token that replaces a rejected one is drawn differently from a plain one, so
    with proposals the seed would not reproduce the answer.
    """
    sampling = request.sampling_params
    if sampling is not None and sampling.seed is not None and sampling.temperature > 0:
        return 0
    return room(request, max_model_len) + int(request.num_tokens)


def room(request: Request, max_model_len: int) -> int:
    """Return the tokens that the request may still produce, by max_tokens and max_model_len."""
    left = min(request.max_tokens - request.num_output_tokens, max_model_len - request.num_tokens)
    return max(0, int(left))


def _column(values: list[int]) -> Ints:
    return np.array(values, np.int64)
