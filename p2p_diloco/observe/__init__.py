"""What a run looks like from outside: one frozen `Snapshot`, and the views that draw it.

Law: looks and never acts. A snapshot is made of what the DHT holds, and a view draws nothing but a snapshot.
"""
