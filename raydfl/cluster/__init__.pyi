"""The names of this room that others use, and where each lives; ``__init__.py`` finds them by it."""

from raydfl.cluster.datasets import write_recordings as write_recordings
from raydfl.cluster.features import compute_on_cluster as compute_on_cluster
from raydfl.cluster.gpu import resolve_auto as resolve_auto
from raydfl.cluster.idle import end_idle_server as end_idle_server
from raydfl.cluster.job import check_no_token as check_no_token
from raydfl.cluster.job import check_persistent as check_persistent
from raydfl.cluster.job import is_job as is_job
from raydfl.cluster.resources import Bundle as Bundle
from raydfl.cluster.resources import check_trial_fits as check_trial_fits
from raydfl.cluster.resources import count_parallel as count_parallel
from raydfl.cluster.resources import format_shortage as format_shortage
from raydfl.cluster.resources import is_granted as is_granted
from raydfl.cluster.resources import list_placement_groups as list_placement_groups
from raydfl.cluster.resources import make_bundles as make_bundles
from raydfl.cluster.server import RemoteServer as RemoteServer
from raydfl.cluster.server import Server as Server
from raydfl.cluster.session import check_without_actors as check_without_actors
from raydfl.cluster.session import connect_ray as connect_ray
from raydfl.cluster.session import current_token as current_token
from raydfl.cluster.session import ray_session as ray_session
from raydfl.cluster.sites import open_serial_pool as open_serial_pool
from raydfl.cluster.sites import prepare_sites as prepare_sites
from raydfl.cluster.use import add_use as add_use
