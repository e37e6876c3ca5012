"""The accounts of the KV memory: how many tokens each request may cache in each model. `kv` holds the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

FIRST_TOKENS = 64
"""Tokens that a new buffer has room for; from there on it doubles."""


class Holder(NamedTuple):
    """The owner of one buffer: a request, in one model."""

    model: int
    """The model's number: 0 for the target, then drafters in the order of `add_model`."""
    request: str


class KVPool:
    """Grants and takes back the buffers that hold each request's KV in each model.

    A buffer that grows is copied, so it doubles. When memory is short for that, it gets FIRST_TOKENS more than it needs
    or just what it needs.
    """

    def __init__(self, total_bytes: int, bytes_per_token: Iterable[int] = (), longest: int = 1 << 40) -> None:
        self.total_bytes = total_bytes
        self.longest = longest
        """Most tokens that a buffer ever needs."""
        self.on_drop: Callable[[Holder], None] = lambda _holder: None
        """Called when the buffer of a running request is taken away."""
        self._bytes_per_token = list(bytes_per_token)
        self._tokens: dict[Holder, int] = {}
        self._used = [0] * len(self._bytes_per_token)
        """Bytes in use, by model number."""

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(self._used)

    @property
    def holders(self) -> Iterable[Holder]:
        return self._tokens.keys()

    def add_model(self, bytes_per_token: int) -> None:
        """Register the next model; its number is the count of those before it. The target comes first."""
        self._bytes_per_token.append(bytes_per_token)
        self._used.append(0)

    def tokens(self, holder: Holder) -> int:
        """Tokens that the holder's buffer has room for; 0 without a buffer."""
        return self._tokens.get(holder, 0)

    def free_tokens(self, model: int, without: Iterable[int] = ()) -> int:
        """Tokens of `model` that free memory has room for. without: models whose KV counts as free too."""
        return (self.free_bytes + sum(self._used[number] for number in without)) // self._bytes_per_token[model]

    @property
    def free_tokens_of_all(self) -> int:
        """Tokens that free memory has room for when every model caches each of them."""
        return self.free_bytes // sum(self._bytes_per_token)

    def grow(self, holder: Holder, tokens: int) -> bool:
        """Give the holder room for `tokens` in all; False, without any change, when there is no memory for them."""
        capacity = self.tokens(holder)
        if tokens <= capacity:
            return True
        doubled = max(FIRST_TOKENS, capacity)
        while doubled < tokens:
            doubled *= 2
        sizes = (max(tokens, min(size, self.longest)) for size in (doubled, tokens + FIRST_TOKENS, tokens))
        return any(self._take(holder, size) for size in sizes)

    def grow_or_drop(self, holder: Holder, tokens: int) -> bool:
        """Like `grow`, but free the buffer when there is no room: KV that cannot grow is of no use to a drafter."""
        if self.grow(holder, tokens):
            return True
        self.drop(holder)
        return False

    def release(self, holder: Holder) -> None:
        """Free the holder's buffer, if it has one."""
        self._used[holder.model] -= self._tokens.pop(holder, 0) * self._bytes_per_token[holder.model]

    def release_all(self, request: str) -> None:
        """Free the buffers of a request that has ended or is preempted, in all models."""
        for model in range(len(self._bytes_per_token)):
            self.release(Holder(model, request))

    def drop_one(self, models: Iterable[int]) -> bool:
        """Take a buffer away from the first of `models` that has one; False when none has."""
        for model in models:
            holder = next((holder for holder in self._tokens if holder.model == model), None)
            if holder is not None:
                self.drop(holder)
                return True
        return False

    def drop(self, holder: Holder) -> None:
        """Take away the buffer of a running request."""
        self.release(holder)
        self.on_drop(holder)

    def _take(self, holder: Holder, tokens: int) -> bool:
        """Resize the holder's buffer; False, without any change, when there is no memory for it."""
        more = (tokens - self.tokens(holder)) * self._bytes_per_token[holder.model]
        if more > self.free_bytes:
            return False
        self._tokens[holder] = tokens
        self._used[holder.model] += more
        return True
