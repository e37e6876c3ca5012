"""The random numbers of vLLM's kernels, bit for bit: a request's seed, a position and a token give one number.

All arithmetic is on uint32 or float32, as on a device: numba would widen it otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider_cpu.arrays import inlined

Number = Any
DRAFT_SALT = 1 << 30
"""Added to a position when a drafter samples: proposals and verification must not share their noise."""
_U32, _U64, _F32 = np.uint32, np.uint64, np.float32
_LOW = np.uint64(0xFFFFFFFF)
_LOG_SERIES = tuple(np.float32(1 / denominator) for denominator in range(8, 0, -1))
_SMALLEST = np.float32(4.6566127342e-10)


@inlined
def _mixed(h: Number, key: Number) -> Number:
    """A round of MurmurHash3."""
    key = _U32(key * _U32(0xCC9E2D51))
    key = _U32((key << _U32(15)) | (key >> _U32(17)))
    h = _U32(h ^ _U32(key * _U32(0x1B873593)))
    h = _U32((h << _U32(13)) | (h >> _U32(19)))
    return _U32(_U32(h * _U32(5)) + _U32(0xE6546B64))


@inlined
def hash_prefix(seed: Number, position: Number) -> Number:
    """The part of a token's hash that all tokens of a row share."""
    bits = _U64(seed)
    h = _mixed(_U32(0), _U32(bits & _LOW))
    h = _mixed(h, _U32((bits >> _U64(32)) & _LOW))
    return _mixed(h, _U32(_U64(position) & _LOW))


@inlined
def token_hash(prefix: Number, token: Number) -> Number:
    """uint32, `murmur3_hash32` of seed, position and token."""
    h = _U32(_mixed(prefix, _U32(token)) ^ _U32(16))
    h = _U32((h ^ (h >> _U32(16))) * _U32(0x85EBCA6B))
    h = _U32((h ^ (h >> _U32(13))) * _U32(0xC2B2AE35))
    return _U32(h ^ (h >> _U32(16)))


@inlined
def gumbel(bits: Number) -> Number:
    """float32, -log(-log(1 - u)) for u = (bits + 1/2) / 2^32, by the kernel's own series where u is small."""
    high, low = _F32(bits >> _U32(16)), _F32(bits & _U32(0xFFFF))
    u = _F32(high * _F32(1.52587890625e-05) + (low + _F32(0.5)) * _F32(2.3283064365386963e-10))
    if u < _F32(0.25):
        series = _F32(0.0)
        for term in _LOG_SERIES:
            series = _F32(term + u * series)
        log_of_rest = _F32(-u * series)
    else:
        log_of_rest = _F32(math.log(max(_F32(_F32(1.0) - u), _F32(5.960464477539063e-08))))
    return _F32(-math.log(-log_of_rest))


@inlined
def uniform(seed: Number, offset: Number) -> Number:
    """float32 above 0 and below 1: Triton's `tl.rand`, Philox4x32-10."""
    k0, k1 = _U64(_U64(seed) & _LOW), _U64(_U64(seed) >> _U64(32))
    c0, c1 = _U64(_U64(offset) & _LOW), _U64(_U64(offset) >> _U64(32))
    c2 = c3 = _U64(0)
    for _ in range(10):
        a, b = _U64(_U64(0xD2511F53) * c0), _U64(_U64(0xCD9E8D57) * c2)
        c0, c1, c2, c3 = (b >> _U64(32)) ^ c1 ^ k0, b & _LOW, (a >> _U64(32)) ^ c3 ^ k1, a & _LOW
        k0, k1 = _U64(k0 + _U64(0x9E3779B9)) & _LOW, _U64(k1 + _U64(0xBB67AE85)) & _LOW
    signed = np.int64(c0) - (np.int64(1 << 32) if c0 >= _U64(1 << 31) else np.int64(0))
    if signed < 0:
        signed = -signed - 1
    return max(_F32(_F32(signed) * _SMALLEST), _SMALLEST)
