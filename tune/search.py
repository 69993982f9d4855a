"""Entry for ``python tune/search.py FILE [key=value ...]`` and for ``ray job submit``: the same as ``raydfl search``."""

import sys

from raydfl.cli.main import main

if __name__ == "__main__":
    main(["search", *sys.argv[1:]])
