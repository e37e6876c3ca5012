"""Figures: the numbers of a window, computed from counters, and their form in the status."""
