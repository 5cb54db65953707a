"""What the parts of a round are called, in the order in which they come.

Law: names, and nothing else.
"""

TRAINING = "training"
"""Inner steps, where they take time."""
PSEUDO_GRADIENT = "pseudo-gradient"
"""Base − local."""
CODEC = "codec"
"""To the wire's precision, and the look at what has come whether it can be used."""
SEARCH = "search"
"""For a group to average with; Hivemind's alone."""
EXCHANGE = "exchange"
"""Everything on the wire, and waiting for others; with gloo and Hivemind the sums too, and their codecs."""
OUTER_STEP = "outer step"
"""With its digests, and in a run the mean."""
MERGE = "merge"
"""Into the model."""
ORDER = (TRAINING, PSEUDO_GRADIENT, CODEC, SEARCH, EXCHANGE, OUTER_STEP, MERGE)
