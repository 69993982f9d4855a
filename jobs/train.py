"""Entry for ``ray job submit --working-dir . -- python jobs/train.py jobs/X.yaml [key=value ...]``: the same as ``raydfl run``.

A job's working directory is temporary: give data.root, data.cache and run.dir as absolute paths that all nodes see. With a
run.name, submitting the same job again resumes the run.
"""

import sys

from raydfl.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
