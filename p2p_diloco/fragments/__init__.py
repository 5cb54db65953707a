"""The protocol with one log of commits per fragment (docs/decisions/0085). Pure: standard library only.

Nothing imports it yet; it will take the place of `core`, from which it takes what stays as it is.
"""
