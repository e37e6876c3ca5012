"""Noise that is a function of a seed, a position and a token, so that it is the same in any batch and at any time.

Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_STEP, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # of splitmix64, signed
_PLACE_STEP = 2862933555777941757  # an odd multiplier, so that positions differ in all bits


class Noise(IntEnum):
    """Independent streams of noise; the value is added to the seed."""

    TARGET = 0
    DRAFT = 0x5851F42D4C957F2D
    ACCEPTANCE = 0x14057B7EF767814F


def gumbel(seeds: Sequence[int], places: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """Draw standard Gumbel noise, (R, V) float64. It depends only on the row's seed, the row's place and the token."""
    return -(-uniform(seeds, places, vocabulary, device).log()).log()


def uniform(seeds: Sequence[int], places: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """Draw uniform noise in (0, 1), (R, V) float64, with the same dependence as `gumbel`."""
    token = torch.arange(1, vocabulary + 1, device=device)  # (V,)
    seed = torch.tensor([_to_signed(value) for value in seeds], device=device)[:, None]  # (R, 1)
    place = torch.tensor([_to_signed(value * _PLACE_STEP) for value in places], device=device)[:, None]  # (R, 1)
    bits = _mix(_mix(token * _STEP + seed) + place)  # (R, V)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(bits: Tensor) -> Tensor:
    """Apply splitmix64's finaliser; int64 overflow is intended."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: `>>` alone would repeat the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _to_signed(number: int) -> int:
    """Read a number's low 64 bits as int64."""
    low = number & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
