"""Storage of a run: commits, clients' private state and the metrics table.

Start with store.py (commits), private.py (private state) and record.py (metrics table).
"""

from raydfl.engine.storage import record
from raydfl.engine.storage.component_digest import ComponentDigest, digest_components, digest_values
from raydfl.engine.storage.folder import (
    check_about,
    check_begun,
    check_revision,
    check_same,
    decisive_changes,
    describe_edit,
    file_name_of,
    final_commit,
    final_state,
    read_about,
    read_config,
    write_config,
)
from raydfl.engine.storage.mirror import local_run, local_runs, mirror_of, private_uri
from raydfl.engine.storage.private import PrivateRef, PrivateStore, SharedPrivateStore, UploadedPrivateStore
from raydfl.engine.storage.record import MetricRow, influences, list_missing_rounds, read_rows, to_rows
from raydfl.engine.storage.store import Commit, RunStore, round_of
from raydfl.engine.storage.trust import approve_code, code_of, remember_code

__all__ = [
    "Commit",
    "ComponentDigest",
    "MetricRow",
    "PrivateRef",
    "PrivateStore",
    "RunStore",
    "SharedPrivateStore",
    "UploadedPrivateStore",
    "approve_code",
    "check_about",
    "check_begun",
    "check_revision",
    "check_same",
    "code_of",
    "decisive_changes",
    "describe_edit",
    "digest_components",
    "digest_values",
    "file_name_of",
    "final_commit",
    "final_state",
    "influences",
    "list_missing_rounds",
    "local_run",
    "local_runs",
    "mirror_of",
    "private_uri",
    "read_about",
    "read_config",
    "read_rows",
    "record",
    "remember_code",
    "round_of",
    "to_rows",
    "write_config",
]
