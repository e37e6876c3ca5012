"""Instruments of the benchmark of many services."""
