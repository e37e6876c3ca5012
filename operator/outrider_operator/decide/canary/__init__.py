"""The canary of a draft pool: sums of its two arms, the judge of them, and the state machine."""
