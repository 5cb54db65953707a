"""How peers reach each other: one small interface, a libp2p adapter and an in-memory one.

Law: bytes only. Nothing here knows what a message means, and nothing but `net.hivemind` imports Hivemind (so
importing this package stays cheap). Frames are sans-I/O (`framing`); streams and deadlines live in `pipe`
and `exchange`.
"""
