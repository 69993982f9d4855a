"""Settings that ``train.fleet`` does not support."""

from __future__ import annotations

from raydfl.core.errors import ConfigError
from raydfl.engine.assembly import Components
from raydfl.engine.groups import Grouped
from raydfl.engine.settings import EvaluateSettings, RaySettings, RunSettings
from raydfl.rules import Gaussian, UniformMean, WeightedMean
from raydfl.training import TrainSettings


def check_fleet(
    train: TrainSettings, evaluate: EvaluateSettings, ray: RaySettings, run: RunSettings, components: Components
) -> None:
    """Reject settings in conflict with ``train.fleet``, and settings without effect when it is off.

    Raises:
        ConfigError: The message names the setting and the remedy.
    """
    if train.fleet is None:
        if run.stop is not None and run.stop.seconds is not None:
            raise ConfigError(
                "run.stop.seconds limits the virtual time, but train.fleet is off. Set train.fleet.buffer, or remove "
                "run.stop.seconds"
            )
        if not isinstance(evaluate.every, int):
            raise ConfigError(
                "evaluate.every.seconds is a virtual time, but train.fleet is off. Set train.fleet.buffer, or set evaluate.every "
                "to a number of rounds"
            )
        return
    method = components.method
    if train.draw == "poisson":
        reason = "train.clients.draw=poisson changes the size of each cohort. Set train.clients.draw=fixed"
    elif train.clients is not None and train.clients.rest > 1:
        reason = "train.clients.rest counts rounds, and clients start at any time. Set train.clients.rest=1"
    elif isinstance(components.rule, Gaussian):
        reason = "rule gaussian cannot account for clients that start at any time. Choose another rule"
    elif ray.actors == "per_client":
        reason = "ray.actors=per_client is not supported. Set ray.actors to a number"
    elif isinstance(method, Grouped):
        reason = "train.groups trains several states. Set train.groups to none"
    elif train.fleet.mix == "model" and type(components.rule) not in {WeightedMean, UniformMean}:
        reason = (
            f"mix=model (FedAsync) needs an average, and rule {type(components.rule).__name__} is no mean. Set "
            f"train.fleet.mix=change"
        )
    elif method.additions:
        reason = f"method {type(method).__name__} sends tensors that the server does not know. Choose another method"
    else:
        return
    raise ConfigError(f"train.fleet trains asynchronously in virtual time, but {reason}, or remove train.fleet")
