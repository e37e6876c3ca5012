"""Suffix drafters: propose what followed the longest earlier occurrence of a request's last tokens.

`PromptLookup` and `Suffix` differ in the lengths of a match alone. The text is searched again in each step, so a
request needs no index and no memory, whatever its vocabulary, and may be replaced at any time. It is one search in a
step, however long the proposal.

Of the matches of the longest length, the latest one is followed; behind the end of the text, it repeats itself. Each
token has a confidence from how many of the matches agree on it:

    BASE + SLOPE * (log(context) + AGREEMENT * log(agreeing^2 / matches))

context: tokens in a row that match, proposed ones included. matches: those that agree on the tokens before. The start
values of `loop.confidences` make an acceptance rate of it, which it then learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider_crds.draft_pool import DrafterSpec, SuffixScope

from outrider_runtime.drafters.method import Method

METHOD = Method()
SLOPE, AGREEMENT = 2.0, 1.25
"""Fitted by a logistic regression to English and Python texts: log loss 0.510, where the length of the match alone has
0.580."""
BASE = -0.2
"""Confidence in a token that followed one match of one token. Until the acceptance is learned it decides between this
drafter and a head: 2 less loses 10% of the tokens a step on JSON, and gains 1% on chat."""
MOST_MATCHES = 64
"""Matches that are compared, the latest first: more would say nothing new, and take long in a text of one token."""

TENANT_ARGUMENT = "outrider_tenant"
"""Names the request's tenant among its extra arguments."""


class MatchLengths(NamedTuple):
    """Tokens of a match."""

    shortest: int
    longest: int


def match_lengths(drafter: DrafterSpec) -> MatchLengths | None:
    """Return the match lengths of a suffix drafter; None for a drafter of another kind."""
    if drafter.prompt_lookup is not None:
        return MatchLengths(drafter.prompt_lookup.min_tokens, drafter.prompt_lookup.max_tokens)
    return MatchLengths(1, drafter.suffix.max_tokens) if drafter.suffix is not None else None


def sharing_scope(drafters: Sequence[DrafterSpec]) -> SuffixScope | None:
    """Return the scope within which requests share answers; None if they do not."""
    scopes = [drafter.suffix.scope for drafter in drafters if drafter.suffix is not None]
    return next((scope for scope in scopes if scope is not SuffixScope.REQUEST), None)


def names_tenants(drafters: Sequence[DrafterSpec]) -> bool:
    """Whether the server has to tell a request's tenant to the engine."""
    return sharing_scope(drafters) is SuffixScope.TENANT
