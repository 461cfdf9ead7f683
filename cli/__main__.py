"""The command `outrider` as a module: python -m outrider.cli"""

from .main import main

if __name__ == "__main__":
    main()
