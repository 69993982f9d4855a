"""The names of this room that others use, and where each lives; ``__init__.py`` finds them by it."""

from raydfl.cluster.datasets import write_recordings as write_recordings
from raydfl.cluster.features import on_the_cluster as on_the_cluster
from raydfl.cluster.gpu import with_share as with_share
from raydfl.cluster.job import check_kept as check_kept
from raydfl.cluster.job import check_no_token as check_no_token
from raydfl.cluster.job import in_a_job as in_a_job
from raydfl.cluster.resources import Bundle as Bundle
from raydfl.cluster.resources import bundles_of as bundles_of
from raydfl.cluster.resources import check_trial_fits as check_trial_fits
from raydfl.cluster.resources import granted as granted
from raydfl.cluster.resources import placement_groups as placement_groups
from raydfl.cluster.resources import room_for as room_for
from raydfl.cluster.resources import waiting_text as waiting_text
from raydfl.cluster.server import RemoteServer as RemoteServer
from raydfl.cluster.server import Server as Server
from raydfl.cluster.session import check_without_actors as check_without_actors
from raydfl.cluster.session import connected as connected
from raydfl.cluster.session import current_token as current_token
from raydfl.cluster.session import ray_session as ray_session
from raydfl.cluster.sites import open_serial_pool as open_serial_pool
from raydfl.cluster.sites import prepare_sites as prepare_sites
