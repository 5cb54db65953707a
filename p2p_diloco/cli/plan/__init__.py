"""`plan`: forecasts a run from the user's machines and links, and advises. The arithmetic is in `p2p_diloco.planning`.

Law: reads flags, files and a run's records; draws what `planning` computes.
"""
