"""Medusa heads: the heads, how they learn, how they are written, and the program that trains them."""
