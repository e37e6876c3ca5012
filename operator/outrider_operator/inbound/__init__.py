"""The boundary: everything that comes from outside the operator passes here, into bounded values of a known type.

One module a source: `objects` (what the API server sends), `pods` (who is a serving pod), `states` (what pods answer),
`results` (what profiling Jobs leave), `series` (what Prometheus knows). What comes from a tenant raises nothing,
whatever it is: it becomes a value or an `Unfit`, which says what does not fit; samples of series that do not fit are
left out. What the API server vouches for (the metadata of objects) is taken as it is. `reading` reads fields of
Kubernetes objects, where a wrong type is an absent value. Nothing here does I/O.
"""
