"""The winner of a row of logits: the likeliest token, or one drawn by the Gumbel-max trick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from outrider_cpu.arrays import compiled
from outrider_cpu.noise import gumbel, hash_prefix, token_hash

Array = Any
_F32, _I16, _I32 = np.float32, np.int16, np.int32
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits_of(logits: torch.Tensor) -> Array:
    """Return the bits of floating-point numbers as integers, which processors compare faster."""
    return logits.view(_BITS[logits.dtype]).numpy()


def _ordered(bits: Any) -> Any:
    """Return an integer that is ordered like the floating-point number with these bits."""
    raise NotImplementedError("compiled code only")


@overload(_ordered)  # type: ignore[untyped-decorator]
def _ordered_by_type(bits: Any) -> Callable[[Any], Any]:
    def of_16(bits: Any) -> Any:
        return _I16(0) if bits == _I16(-0x8000) else _I16(bits ^ _I16((bits >> _I16(15)) & _I16(0x7FFF)))

    def of_32(bits: Any) -> Any:
        return _I32(0) if bits == _I32(-0x80000000) else _I32(bits ^ _I32((bits >> _I32(31)) & _I32(0x7FFFFFFF)))

    return of_16 if bits == types.int16 else of_32


@compiled
def likeliest(bits: Array, width: int) -> int:
    """Return the index of the first largest of `width` logits, passed as their bits."""
    largest = _ordered(bits[0])
    for token in range(width):  # without the place, so that it becomes vector instructions
        largest = max(largest, _ordered(bits[token]))
    for token in range(width):
        if _ordered(bits[token]) == largest:
            return token
    return 0


_CANNOT_WIN = _F32(22.9)
"""An upper bound of the noise: it is at most -log of the smallest u, 2^-33."""


@compiled
def drawn(row: Array, width: int, seed: int, position: int) -> int:
    """Return the token whose logit plus Gumbel noise is largest. row: float32, temperature applied.

    A token's noise is at most -log(u), so most are skipped without it: those far below the best sum so far, and
    those somewhat below it whose random bits are not small enough.
    """
    first: int = likeliest(row.view(_I32), width)
    if row[first] == _F32(-np.inf):
        return 0
    prefix = hash_prefix(seed, position)
    best, winner = _F32(row[first] + gumbel(token_hash(prefix, first))), first
    hopeless, far, near = _F32(best - _CANNOT_WIN), _F32(best - _F32(12.0)), _F32(best - _F32(6.0))
    far_bits = np.uint32(math.exp(-12.0) * 4294967296.0) + np.uint32(2)
    near_bits = np.uint32(math.exp(-6.0) * 4294967296.0) + np.uint32(2)
    for token in range(width):
        logit = row[token]
        if logit < hopeless:
            continue
        bits = token_hash(prefix, token)
        if (logit < far and bits > far_bits) or (logit < near and bits > near_bits):
            continue
        total = _F32(logit + gumbel(bits))
        if total > best or (total == best and token < winner):
            best, winner = total, token
    return winner
