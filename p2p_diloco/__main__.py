"""`python -m p2p_diloco` runs the command line `p2p-diloco`. Law: nothing else is here."""

from __future__ import annotations

from p2p_diloco.cli import main

if __name__ == "__main__":
    main()
