"""Data sets as data nodes serve them: slices with hashes, how files are cut into them, and where they are kept."""
