"""A smaller model of the same vocabulary: a pass a token, over a cache of its own.

Over a hole in that cache it proposes junk. Measured on SmolLM2, k = 2, accepted per trial: the target as its own draft
falls from 1.00 to 0.73 after 16 skipped steps and to 0.60 after 40, and it stays there until the hole is closed; then
it is 1.00 again.
"""

from __future__ import annotations

from outrider_runtime.drafters.method import Method

METHOD = Method(passes=True, needs_kv=True)
