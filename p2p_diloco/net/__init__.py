"""How peers reach each other: one small interface and its libp2p adapter.

Law: bytes only; nothing here knows what a message means. Importing this package is cheap: `hivemind_library` alone
imports Hivemind.

    interface                   what the node asks of a transport, and a transport of the node
    hivemind                    the adapter: joins the parts below
    exchange, sending, receiving, streams      messages over streams
    link, payload_stream, frame_stream, framing, pipe      one stream each, from messages down to bytes
    direct, dialing, listener, offer, tls, tcp, pacing     direct connections for payloads
    dht, daemon, records, identity, signing, hivemind_library     libp2p and the DHT
"""
