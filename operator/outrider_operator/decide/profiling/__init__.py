"""Profiling: what is measured, the Jobs that measure, and the ConfigMaps that keep what they found."""
