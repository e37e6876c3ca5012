"""Step times as tables: what a forward pass costs on hardware, measured by others or here, never a formula of ours.

`tables` holds one model's times, `world` a target's with its drafters', `compose` makes them from NVIDIA's measured
kernels, `magicdec` from the rows of a paper, `checked` compares a composition with an independent measurement.
"""
