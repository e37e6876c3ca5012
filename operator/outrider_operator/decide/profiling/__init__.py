"""Profiling: what to measure, the Jobs that measure it, and the ConfigMaps that store the results."""
