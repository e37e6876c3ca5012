"""Decisions only: how far each request speculates at each engine step, and with which drafter.

Everything here is plain numpy over frozen values: no engine, no I/O, no clock of its own. `batch` holds what the
engine tells and gets, `settings` and `costs` what the controller is built from, `controller` the entry point.
"""
