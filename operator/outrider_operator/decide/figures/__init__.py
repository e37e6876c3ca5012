"""Figures: from counters to the numbers of a window, and how the status prints them."""
