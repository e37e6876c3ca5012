"""Which requests share answers, and which answers are kept."""

from __future__ import annotations

import pytest
from outrider_crds.draft_pool import DrafterSpec, DraftMethod, Suffix, SuffixScope
from outrider_runtime.drafters.kept_answers import NO_OWNER
from outrider_runtime.drafters.suffix import TENANT_ARGUMENT
from outrider_runtime.loop.shared_answers import AnswerSharing


def sharing(scope: SuffixScope) -> AnswerSharing:
    """Requests a and b have the same tenant and adapter; c has others; d has neither."""
    made = AnswerSharing([DrafterSpec(name="s", method=DraftMethod.SUFFIX, suffix=Suffix(scope=scope))])
    for name, adapter, tenant in (("a", "x", "t"), ("b", "x", "t"), ("c", "y", "u"), ("d", None, None)):
        made.register(name, adapter, {} if tenant is None else {TENANT_ARGUMENT: tenant})
    return made


@pytest.mark.parametrize(
    ("scope", "groups"),
    [
        (SuffixScope.SERVICE, [["a", "b", "c", "d"]]),
        (SuffixScope.ADAPTER, [["a", "b"], ["c"], ["d"]]),
        (SuffixScope.TENANT, [["a", "b"], ["c"]]),
    ],
)
def test_requests_of_a_scope_share_with_each_other_alone(scope: SuffixScope, groups: list[list[str]]) -> None:
    shared = sharing(scope).take("abcd", 1.0)
    assert shared is not None
    owners = dict(zip("abcd", shared.owners.tolist(), strict=True))
    for group in groups:
        assert len({owners.pop(name) for name in group}) == 1
    assert set(owners.values()) <= {NO_OWNER}, "a request without a tenant"
    assert len(set(shared.owners.tolist()) - {NO_OWNER}) == len(groups)


def test_only_complete_answers_of_known_requests_are_kept() -> None:
    """Promise: nothing of an aborted request is kept, nor of one that shares with no other, or whose prompt is no text,
    so that the engine never named it."""
    made = sharing(SuffixScope.TENANT)
    made.note_end("a", [1, 2], 5.0)
    made.note_end("b", None, 5.0)
    made.note_end("d", [3], 5.0)
    made.note_end("image", [4], 5.0)
    shared = made.take(["c"], 6.0)
    assert shared is not None
    assert [(answer.tokens.tolist(), answer.finished_at_s) for answer in shared.finished] == [([1, 2], 5.0)]
    again = made.take(["c"], 7.0)
    assert again is not None
    assert again.finished == (), "each is sent once"


def test_scope_request_shares_nothing() -> None:
    made = sharing(SuffixScope.REQUEST)
    made.note_end("a", [1, 2], 5.0)
    assert made.take(["b"], 6.0) is None
