"""Settings group ``privacy``, and the settings excluded by differential privacy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.settings import Settings
from raydfl.core.users_code import is_users
from raydfl.data import DataSettings
from raydfl.engine.assembly import Components
from raydfl.engine.groups import Grouped
from raydfl.engine.settings import EvaluateSettings, RunSettings
from raydfl.objectives import Contrast
from raydfl.rules import AdaptiveClip, Gaussian
from raydfl.training import TrainSettings


class StatedClients(Settings):
    """Numbers of clients of a federation that a smaller run simulates."""

    clients: int = Field(ge=1, description="Number of eligible clients.")
    cohort: int = Field(ge=1, description="Clients in each round; with poisson sampling their expected number.")

    @model_validator(mode="after")
    def _check_cohort(self) -> StatedClients:
        if self.cohort > self.clients:
            raise ValueError(f"cohort ({self.cohort}) exceeds clients ({self.clients}). Lower cohort")
        return self


class PrivacySettings(Settings):
    """Differential privacy of the released models, by client (rule ``gaussian``) or by example (``train.optimiser.private``)."""

    delta: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Failure probability of the guarantee. null: the number of eligible clients to the power of -1.1; "
        "with train.optimiser.private the number of clips of the largest client.",
    )
    key: Literal["secret", "seed"] = Field(
        "secret",
        description="Source of the noise, and of the random cohorts or batches. secret: the random file private.key in the run's "
        "folder. seed: the run's seed, only for studies, because the seed reveals the noise.",
    )
    metrics: Literal["none", "outside"] = Field(
        "none",
        description="Metrics of clients (training loss and more). none: not recorded. outside: recorded, although the guarantee "
        "does not cover them.",
    )
    as_if: StatedClients | None = Field(
        None,
        description="Simulation of a larger federation with the rule gaussian: epsilon is computed for these numbers of clients, "
        "and the noise of the mean is theirs. Every epsilon is marked. null: the run's own clients.",
    )


def check_privacy(
    settings: PrivacySettings,
    components: Components,
    data: DataSettings,
    train: TrainSettings,
    evaluate: EvaluateSettings,
    run: RunSettings,
) -> None:
    """Reject settings outside the guarantee of the rule ``gaussian`` or of ``train.optimiser.private``.

    Raises:
        ConfigError: A setting is outside the guarantee, or a setting of privacy has no effect. The message names it.
    """
    rule, method = components.rule, components.method
    promised = settings
    if any(own.corrupt.canaries is not None for own in data.each.values()):
        _check_canaries(components, data)
        promised = settings.model_copy(update={"delta": None})  # the audit needs delta, also without a guarantee
    if train.optimiser.private is not None:
        _check_examples(settings, components, data, train, evaluate, run)
        return
    if not isinstance(rule, Gaussian):
        limit = "run.stop.epsilon" if run.stop is not None and run.stop.epsilon is not None else ""
        if where := "privacy" if promised != PrivacySettings() else limit:
            raise ConfigError(
                f"{where}: rule {type(rule).__name__} gives no differential privacy. Set method.rule to "
                f"{{name: gaussian, clip: ..., noise: ...}}, set train.optimiser.private, or remove {where}"
            )
        return
    if rule.noise is None and rule.epsilon is None:
        raise ConfigError(
            "method.rule: gaussian needs noise or epsilon. Set method.rule.epsilon to calibrate the noise, or "
            "method.rule.noise (raydfl privacy FILE lists the epsilon of each noise)"
        )
    if rule.noise == 0 and run.stop is not None and run.stop.epsilon is not None:
        raise ConfigError(
            "run.stop.epsilon: with method.rule.noise=0 epsilon is infinite. Set method.rule.noise above 0"
        )
    name = type(method).__name__
    reason = ""
    if isinstance(method, Grouped):
        reason, remedy = "the groups of clients depend on single updates", "Set train.groups to none"
    elif not method.associative or method.additions or method.changes:
        reason = f"method {name} uses more of the updates than their sum"
        remedy = "Choose a method with a server for the sum alone: fedavg, fedprox, fedadam, fedper"
    elif method.phases or train.phases:
        reason, remedy = "the training has several phases", "Choose a method without phases, and remove train.phases"
    elif data.parts:
        reason, remedy = "data.parts has several sets of clients", "Use a single data set"
    if reason:
        raise ConfigError(
            f"method.rule: gaussian has a known sensitivity only for the sum of all clients, but {reason}. {remedy}"
        )
    clients = train.clients
    if clients is not None and (clients.weight is not None or clients.strata is not None):
        where = "weight" if clients.weight is not None else "strata"
        raise ConfigError(
            f"train.clients.{where}: rule gaussian needs clients with equal chances. Remove train.clients.{where}"
        )
    if train.deadline is not None and train.together not in (1, "auto"):  # auto is then 1
        raise ConfigError(
            f"train.together: {train.together} with train.deadline lets the time of one client end the training of others, so the "
            f"sensitivity of rule gaussian is unknown. Set train.together=1, or train.deadline=null"
        )
    _check_turns(settings, rule, train)
    _check_releases(settings, evaluate, run, "rule gaussian")


def _check_turns(settings: PrivacySettings, rule: Gaussian, train: TrainSettings) -> None:
    """Reject correlated noise without turns of the clients, and stated clients that do not fit the turns and the clip.

    Raises:
        ConfigError: The message names the setting.
    """
    rest, stated = 1 if train.clients is None else train.clients.rest, settings.as_if
    if rule.bands > min(rest, train.rounds):
        where, most = ("train.clients.rest", rest) if rule.bands > rest else ("train.rounds", train.rounds)
        raise ConfigError(
            f"method.rule.bands: {rule.bands} exceeds {where} ({most}). Lower bands, or raise {where}. A client must rest for as "
            f"many rounds as the noise is correlated"
        )
    if stated is not None and stated.cohort * rest > stated.clients:
        raise ConfigError(
            f"privacy.as_if: train.clients.rest={rest} divides the {stated.clients} clients into groups of "
            f"{stated.clients // rest}, fewer than its cohort of {stated.cohort}. Lower privacy.as_if.cohort, or train.clients.rest"
        )
    if stated is not None and isinstance(rule.clip, AdaptiveClip) and rule.clip.noise is not None:
        raise ConfigError(
            "method.rule.clip.noise: with privacy.as_if the noise in the count of clients follows from the cohorts. Set it to null"
        )


def _check_releases(settings: PrivacySettings, evaluate: EvaluateSettings, run: RunSettings, name: str) -> None:
    """Reject results without noise.

    Raises:
        ConfigError: Reference runs or metrics of clients are outside the guarantee.
    """
    if run.reference is not None and (run.reference.pooled or run.reference.local):
        raise ConfigError(
            "run.reference: reference runs train on the clients' data without noise. Set run.reference=null"
        )
    if evaluate.clients != "none" and settings.metrics == "none":
        raise ConfigError(
            f"evaluate.clients: {evaluate.clients} measures models on the clients' clips, outside the guarantee of {name}. "
            f"Set evaluate.clients=none, or privacy.metrics=outside to record such metrics outside the guarantee"
        )


def _check_examples(
    settings: PrivacySettings,
    components: Components,
    data: DataSettings,
    train: TrainSettings,
    evaluate: EvaluateSettings,
    run: RunSettings,
) -> None:
    """Reject settings outside the guarantee of ``train.optimiser.private``.

    Raises:
        ConfigError: A setting is outside the guarantee. The message names it.
    """
    method, private = components.method, train.optimiser.private
    views = [view for part in data.each.values() for view in part.all_views.values()]
    user_made = [
        type(transform).__name__
        for view in views
        for transform in view.pipeline.all
        if is_users(type(transform).__module__)
    ]
    conflicts = {
        "method.rule": (isinstance(components.rule, Gaussian), "gaussian protects clients", "Choose another rule"),
        "method.name": (
            bool(method.phases or train.phases),
            "the training has several phases, and the accounting knows one number of epochs",
            "Choose a method without phases, and remove train.phases",
        ),
        "method": (
            method.reads_metrics,
            f"the server of {type(method).__name__} uses metrics of clients, which carry no noise",
            "Choose another method",
        ),
        "train.class_weights": (
            train.class_weights != "none",
            "the weights come from a client's labels without noise",
            "Set it to none",
        ),
        "train.groups": (
            isinstance(method, Grouped) and method.discovery.choosing,
            "clients would choose their group by their clips",
            "Choose other groups, or none",
        ),
        "objective": (
            isinstance(method.objective, Contrast),
            "contrast compares the clips of a batch, so no clip has a loss of its own",
            "Choose another objective, such as classify or reconstruct",
        ),
        "privacy.as_if": (
            settings.as_if is not None,
            "their guarantee does not depend on the number of clients",
            "Set it to null",
        ),
        "data.parts": (bool(data.parts), "several sets of clients have no common guarantee", "Use a single data set"),
        "data.pools": (
            bool(data.pools),
            "steps draw clips from several pools, which are no Poisson samples",
            "Remove it",
        ),
        "data.unlabelled": (
            data.unlabelled is not None,
            "steps draw clips from several pools, which are no Poisson samples",
            "Remove it",
        ),
        "data.segment": (
            data.segment is not None,
            "a clip has several segments, so clipped gradients of segments do not protect it",
            "Set it to null",
        ),
        "data.transforms": (
            bool(user_made),
            f"{', '.join(user_made)} may use further clips, which would not be protected",
            "Choose built-in transforms",
        ),
        "train.deadline": (
            train.deadline is not None,
            "the number of steps would depend on the time",
            "Set it to null",
        ),
        "train.precision": (
            train.precision == "float16",
            "float16 scales the gradients of a whole batch",
            "Choose float32 or bfloat16",
        ),
        "run.stop.epsilon": (
            private is not None and not private.noise and run.stop is not None and run.stop.epsilon is not None,
            "without noise epsilon is infinite",
            "Set train.optimiser.private.noise above 0",
        ),
    }
    for where, (conflict, reason, remedy) in conflicts.items():
        if conflict:
            raise ConfigError(f"{where}: train.optimiser.private protects single clips, but {reason}. {remedy}")
    _check_releases(settings, evaluate, run, "train.optimiser.private")


def _check_canaries(components: Components, data: DataSettings) -> None:
    """Reject settings without a meaning for canary clips.

    Raises:
        ConfigError: The message names the setting.
    """
    pools, by_table = bool(data.pools) or data.unlabelled is not None, data.partition.by == "table"
    conflicts = {
        "objective": (
            components.method.objective.answers != "class",
            "the wrong label of a canary is another class",
            "Choose objective=classify",
        ),
        "data.label_sets": (data.label_sets is not None, "a clip has several classes", "Set it to null"),
        "data.label_sequences": (data.label_sequences is not None, "a label is a transcript", "Set it to null"),
        "data.events": (data.events is not None, "a label lists events", "Set it to null"),
        "data.parts": (bool(data.parts), "several sets of clients have no common audit", "Use a single data set"),
        "data.sites": (bool(data.sites), "the audit needs the clips", "Remove it"),
        "data.pools" if data.pools else "data.unlabelled": (pools, "several pools have no common audit", "Remove it"),
        "data.partition.by": (by_table, "clients of a table may share clips", "Choose another partition"),
        "method.rule": (
            isinstance(components.rule, Gaussian),
            "gaussian protects clients",
            "Audit it with the attack canary, or choose another rule",
        ),
        "attack": (
            components.attack is not None,
            "attackers do not train on their clips as others do",
            "Set it to null",
        ),
    }
    for where, (conflict, reason, remedy) in conflicts.items():
        if conflict:
            raise ConfigError(
                f"{where}: data.corrupt.canaries audits the training on single clips, but {reason}. {remedy}"
            )
