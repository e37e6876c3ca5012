"""The boundary: everything that comes from outside the operator passes here, into bounded values of a known type.

One module a source: `objects` (what the API server sends), `pods` (who is a serving pod), `states` (what pods answer),
`results` (what profiling Jobs leave), `series` (what Prometheus knows). Each returns its value or an `Unfit`, which
says what does not fit; none raises, whatever it is given. `reading` reads fields of Kubernetes objects, where a wrong
type is an absent value. Nothing here does I/O.
"""
