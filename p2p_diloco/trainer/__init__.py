"""The built-in trainer: a small GPT on real text, in a run or alone.

Law: nothing is imported here, so that the command line can read the settings (`config`) without torch. The
trainer uses the program as any user's script does.

    train      the loop, and `main`
    alone      what the loop asks of a run, and the answer without one
    config     what can be set
    gpt        the model
    text       what it learns from and is judged by
    schedule   the learning rate
    progress   what the user sees
"""
