"""Callbacks that let the training loops of other libraries take part in a run, and sinks that hand on what is reported.

Law: thin; what they do in a run they do through `Peer`'s public methods. Each module that needs a library is imported
only by its user, and works without the other libraries.

    transformers  `DilocoCallback` for Transformers' Trainer
    lightning     `DilocoCallback` for Lightning's Trainer
    schedule      sets a learning rate scheduler to the run's step; for any loop
    sinks         hands each report on to a file, TensorBoard, W&B or Aim; for any loop
    taking_part   what both callbacks do: enter, evaluate the global parameters, leave
    sizes         the number of a Transformers model's parameters, for `plan`
"""
