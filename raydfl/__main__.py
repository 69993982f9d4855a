"""``python -m raydfl`` is the command ``raydfl``."""

from raydfl.cli.main import main

if __name__ == "__main__":
    main()
