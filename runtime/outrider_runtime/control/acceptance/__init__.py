"""What is accepted: P(a node is accepted | its parent was).

estimate  by drafter, depth, confidence, class and request: what plans ask for
trials    what is counted of each step
groups    what sets a class or a request apart
trees     a node's later children, and a beam's places
"""
