"""Medusa heads: the heads, their training, their files, and the program that trains them."""
