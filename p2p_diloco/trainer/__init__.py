"""The built-in trainer: a small GPT on real text, in a run or alone.

Law: nothing is imported here, so that the command line can read the settings (`config`) and the text (`blocks`)
without torch. The trainer uses the package as any user's script does.

    train      the loop, and `main`
    alone      training in no run
    config     what can be set
    gpt        the model
    blocks     the text that it learns from and is judged by, as bytes
    text       the same as tensors
    schedule   the learning rate
    progress   what the user sees
"""
