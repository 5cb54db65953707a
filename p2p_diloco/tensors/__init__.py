"""Tensor work: layout, flat copies, wire codecs, mean, outer step, digests, checkpoints.

Law: pure arithmetic and plain files; no peer, message, clock or socket. Versions and plans of the layers above are
passed as plain integers, strings and bytes.

    layout, partition   parameters, fragments and slices: offsets in the flat vector
    buffers             which buffers are exchanged; their outer step
    flat                pieces of flat vectors, threads, the pseudo-gradient; a tensor's bytes, without a copy
    codec               table of wire codecs; those of few bits are in blockwise and topk
    feedback            error feedback: a lossy codec's error is added to the next contribution
    mean, limits        weighted mean of the contributions to a slice; what a contribution or a mean can do to it
    outer, delayed      outer optimizer and Delayed Nesterov, one slice at a time
    outer_state         outer state of all slices of a replica, whose steps are made in place; digests
    checkpoint          the outer state, and nested state dicts, on disk
    card, export        what a saved model has besides its parameters; a model that other programs load

Give torch one thread (OMP_NUM_THREADS=1) in a process beside a trainer: on busy cores, waiting threads cost more than
they gain.
"""
