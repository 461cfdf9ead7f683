"""Entry for launchers, with or without a clone.

Run it with `accelerate launch -m outrider.train conf=demo`.
"""

from ..cli.compose import main

if __name__ == "__main__":
    main()
