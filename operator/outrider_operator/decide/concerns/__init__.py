"""The concerns of the operator: each is `f(world, intent) -> ConcernOutcome`, without any I/O."""
