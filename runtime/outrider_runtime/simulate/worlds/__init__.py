"""Step times of a target with its drafters on one kind of hardware, measured by others or here.

`tables` holds one model's times, `world` a target's with its drafters', `compose` makes them from NVIDIA's measured
kernels, `magicdec` from the rows of a paper, `profiled` from what outrider-profile measured (`coefficients`), `checked`
compares a composition with an independent measurement.
"""
