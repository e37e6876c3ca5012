"""The concerns of the operator: each is `f(world, intent) -> Outcome`, without any I/O."""
