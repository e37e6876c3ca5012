"""The search for the best plan: the best nodes to verify, and the best drafters to run.

nodes       which of the proposals the target scores
offers      what each drafter can propose for each request in the next step, and its price
candidates  the sets of drafters and draft lengths that the search compares
sharing     which request uses which drafter, for one such candidate
drafters    the best candidate
"""
