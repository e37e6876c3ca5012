"""Acceptance rates: P(a node is accepted | its parent was).

estimate  the rate by drafter, depth, confidence, class and request, as plans read it
trials    the counts of each step that it rests on
groups    how a class or a request differs from the mean
trees     a node's children after the first, and the nodes of a beam
"""
