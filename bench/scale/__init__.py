"""What the benchmark of many services measures with."""
