"""Observing a run from outside: one frozen `Snapshot`, and the views that draw it.

Law: an observer takes no part in a run. A snapshot is made only from DHT records, and a view draws only a snapshot.
`revise` is the one exception: it stores a record for the founder.
"""
