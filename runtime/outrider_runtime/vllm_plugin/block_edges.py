"""KV pages behind a request's last one: entries of a block table that an earlier request of its row has left."""

from __future__ import annotations

import torch


def clear_past_last_block(table: torch.Tensor, counts: torch.Tensor, tokens: int, page_tokens: int) -> None:
    """Set to 0 the entries behind each row's `counts` (rows,) pages that `tokens` more tokens may reach. 0 is the page
    that no request owns.

    table: (rows, pages).
    """
    widest = table.shape[1]
    reach = torch.arange(1 + -(-tokens // page_tokens), device=table.device)
    columns = (counts[:, None].to(torch.int64) + reach).clamp(max=widest - 1)
    entries = table.gather(1, columns)
    table.scatter_(1, columns, torch.where(columns >= counts[:, None], 0, entries))
