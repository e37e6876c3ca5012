"""The evidence of `make bench`: what is compared (files), how it is run, and how raw results are kept."""
