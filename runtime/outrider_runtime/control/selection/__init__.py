"""What is worth it: the best nodes, and the best drafters.

nodes       what the target scores of what was proposed
offers      what the drafters offer for the next step, and to whom
candidates  the plans that the search looks at
sharing     who asks whom, given one of them
drafters    the best of them
"""
