"""Tensor work: layout, flat copies, wire codecs, mean, outer step, digests, checkpoints.

Law: pure arithmetic and plain files; no peer, message, clock or socket. Versions and plans of the layers above are
passed as plain integers, strings and bytes.

    layout, partition   parameters, fragments and slices: offsets in the flat vector
    flat                pieces of flat vectors, and the pseudo-gradient
    codec               table of wire codecs; implemented in cast (with unbiased rounding), blockwise and topk
    feedback            error feedback: a lossy codec's error is added to the next contribution
    raw                 a tensor's bytes, without a copy
    mean                weighted mean of the contributions to a slice
    outer, delayed      outer optimizer and Delayed Nesterov, one slice at a time
    digest              hash of a slice's outer state
    store               outer state of all slices of a replica
    outer_state         the same for slices of `fragments`, whose steps are made in place
    checkpoint, packing the outer state, and nested state dicts, on disk

Give torch one thread (OMP_NUM_THREADS=1) in a process beside a trainer: on busy cores, waiting threads cost more than
they gain.
"""
