"""`bench`: how long a whole round takes between real processes, where its time goes, and what else could do it.

Law: measures, and changes nothing. Each peer, and each counterpart of it, is a process of its own (`ours`, `raw`,
`gloo`, `averager`); they take turns, a round each, so that whatever else the machine does strikes all alike.
"""
