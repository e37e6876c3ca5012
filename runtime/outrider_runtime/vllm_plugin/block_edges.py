"""Stale entries of a block table: pages behind a request's last one, left by an earlier request of its row."""

from __future__ import annotations

import torch


def clear_past_last_block(table: torch.Tensor, counts: torch.Tensor, tokens: int, page_tokens: int) -> None:
    """Set stale entries that `tokens` more tokens may reach to 0, the page that no request owns.

    table: (rows, pages). counts: (rows,), pages of each row's request.
    """
    widest = table.shape[1]
    reach = torch.arange(1 + -(-tokens // page_tokens), device=table.device)
    columns = (counts[:, None].to(torch.int64) + reach).clamp(max=widest - 1)
    entries = table.gather(1, columns)
    table.scatter_(1, columns, torch.where(columns >= counts[:, None], 0, entries))
