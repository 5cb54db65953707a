"""The built-in trainer: a small GPT on real text.

Law: nothing is imported here, so that the command line can read the settings (`config`) and the text (`blocks`)
without torch. The trainer uses the package as any user's script does.

    train      the loop, its learning rate, what is reported, and `main`
    config     what can be set
    gpt        the model
    blocks     the text to train on and to evaluate on, as bytes
    text       that text as tensors
"""
