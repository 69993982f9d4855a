"""Entry for ``ray job submit --working-dir . -- python jobs/train.py jobs/X.yaml [key=value ...]``: the same as ``raydfl run``.

A job's working directory is temporary: set data.cache to an absolute path visible to all nodes, and data.root and run.dir to
such paths or to URIs (docs/clusters.md#jobs). With a run.name, submitting the same job again resumes the run.
"""

import sys

from raydfl.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
