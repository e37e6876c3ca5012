"""Noise that is a function of a seed, a token's place and the token: whoever asks again, anywhere, gets the same.

Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_STEP, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's, signed
_PLACE_STEP = 2862933555777941757


class Noise(IntEnum):
    """Independent of each other; added to a seed."""

    TARGET = 0
    DRAFT = 0x5851F42D4C957F2D
    ACCEPTANCE = 0x14057B7EF767814F


def gumbel(seeds: Sequence[int], places: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """(R, V) float64 of standard Gumbel noise; each number hangs on the row's seed and place and the token alone."""
    return -(-uniform(seeds, places, vocabulary, device).log()).log()


def uniform(seeds: Sequence[int], places: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """(R, V) float64 in (0, 1), of the same kind."""
    token = torch.arange(1, vocabulary + 1, device=device)
    seed = torch.tensor([_signed(one) for one in seeds], device=device)[:, None]
    place = torch.tensor([_signed(one * _PLACE_STEP) for one in places], device=device)[:, None]
    bits = _mixed(_mixed(token * _STEP + seed) + place)
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def _mixed(bits: Tensor) -> Tensor:
    """splitmix64's finaliser, on int64 that overflow."""
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """Its low 64 bits as int64."""
    low = number & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
