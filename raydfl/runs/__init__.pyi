"""Public names of this room and the modules that define them. ``__init__.py`` imports names from this table."""

from raydfl.runs._replay import replay as replay
from raydfl.runs._run import iterate_rounds as iterate_rounds
from raydfl.runs._run import resume as resume
from raydfl.runs._run import run as run
from raydfl.runs.folder import create as create
from raydfl.runs.folder import lock_run_dir as lock_run_dir
from raydfl.runs.progress import Advance as Advance
from raydfl.runs.progress import Progress as Progress
from raydfl.runs.progress import default_progress as default_progress
from raydfl.runs.result import Result as Result
from raydfl.runs.result import load_result as load_result
from raydfl.runs.stopping import StopSignals as StopSignals
from raydfl.runs.tracking import Tracker as Tracker
from raydfl.runs.tracking import make_tracker as make_tracker
from raydfl.runs.verdict import HeadlineScore as HeadlineScore
from raydfl.runs.verdict import Verdict as Verdict
