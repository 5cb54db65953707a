"""The transport, by which peers reach each other: one small interface, and its adapter to libp2p.

Law: bytes only; nothing here knows what a message means. Importing this package is cheap: only `hivemind_library`
imports Hivemind.

    interface                   what the node needs of a transport, and what a transport needs of the node
    hivemind                    the adapter: joins the parts below
    exchange, receiving         messages over streams, small ones over one to each peer
    streams, framing, pipe      one stream each, from messages down to bytes
    direct, listener, tls, tcp      direct connections for payloads
    paths, relay, attempts      streams through a third peer
    reach, dial_back, reasons   where this machine can be dialled, and by whom; why a peer isn't reached, in words
    bandwidth, shares     the measured link; how many payloads are received at a time
    dht, daemon, probing, records, signing, private_files, hivemind_library     libp2p and the DHT
    stale_sockets               sockets that killed daemons have left
    certificates, membership, hello, invitation, invitation_used, invited     private runs
"""
