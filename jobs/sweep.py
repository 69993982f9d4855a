"""Entry for ``ray job submit --working-dir . -- python jobs/sweep.py FILE [key=value ...] [options]``: as ``raydfl sweep``.

Each run of the sweep is a trial of Ray Tune. All nodes must see the sweep's folder (run.dir), the recordings and the feature cache
(data.cache) under the same absolute paths. Submitting the same job again continues it.
"""

import sys

from raydfl.cli.main import main

if __name__ == "__main__":
    main(["sweep", *sys.argv[1:]])
