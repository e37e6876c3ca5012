"""An EAGLE-3 head: a layer over the target's hidden states, a pass a token.

Hidden states are gone after their step, so a hole stays. Measured on SmolLM2, k = 2: the head accepts 0.36 per trial
whatever was skipped, its whole prompt included. So a hole is not forbidden, and what it costs is learned.
"""

from __future__ import annotations

from outrider_runtime.drafters.method import Method

METHOD = Method(passes=True, needs_hidden=True)
