"""Everything that is done to tensors: layout, flat copies, wire codecs, mean, outer step, digests,
checkpoints.

Law: pure arithmetic and plain files. Nothing here knows a peer, a message, a clock or a socket; what the
layers above call a version or a plan reaches this one as plain integers, strings and bytes.

    layout, partition   which parameter sits where in the flat vector; fragments and shards
    flat                between a model's parameters and the flat vector
    codec               between fp32 and the bytes that travel; cast, blockwise, topk: its rows
    stochastic          rounding that is right on average
    feedback            what a codec loses, kept for the next contribution
    raw                 between tensors and the bytes that they are made of
    mean                the weighted mean of an averaging group
    outer               the outer optimizer, one shard at a time
    digest              one hash over a shard's outer state
    store               the outer state of every shard that a replica holds
    checkpoint, packing the same on disk

A process that works beside a trainer does well to give torch one thread (OMP_NUM_THREADS=1): threads that
wait for one another on busy cores cost more than they bring.
"""
