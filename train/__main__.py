"""The entry for launchers, with or without a clone: accelerate launch -m outrider.train conf=demo"""

from ..cli.compose import main

if __name__ == "__main__":
    main()
