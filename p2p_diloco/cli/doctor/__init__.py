"""`doctor` finds what would keep a peer on this machine from taking part in a run. `env` prints what to send with a bug
report.

Law: looks and measures; it changes no file and no setting, and takes no part in a run. A check is a small function that
yields what it `Found`; `examination` calls all of them. Hivemind is loaded only to talk to other peers.
"""
