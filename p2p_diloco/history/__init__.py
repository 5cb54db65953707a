"""What happened in a run, real or simulated: read, ordered, told, and played again."""
