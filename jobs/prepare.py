"""Entry for ``ray job submit --working-dir . -- python jobs/prepare.py FILE [key=value ...]``: as ``raydfl data prepare``.

All CPUs of the cluster compute. All nodes must see the feature cache (data.cache) and the recordings under the same
absolute paths. Existing features are not computed again, so a stopped job continues when it is submitted again.
"""

import sys

from raydfl.cli.main import main

if __name__ == "__main__":
    main(["data", "prepare", *sys.argv[1:]])
