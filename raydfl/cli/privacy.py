"""The commands ``raydfl privacy``, for the guarantee of a configuration, and ``raydfl audit``, for a test of a run's guarantee."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, cast

import typer
from rich.console import Console
from rich.table import Table

from raydfl.cli._arguments import File, Json, Overrides, RunDir, Trust, show_progress
from raydfl.core.errors import ConfigError, InputError

_NOISES = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


def privacy_command(file: File, overrides: Overrides = None) -> None:
    """Print the epsilon of each noise for the run configured in FILE, without training.

    The configuration needs the rule gaussian (guarantee of clients) or train.optimiser.private (guarantee of clips). The
    signal-to-noise ratio is the largest possible sum of changes, or of a step's gradients, divided by the norm of the noise.
    Below 1, the noise is larger than everything that enters the sum. The column "last model" is the standard deviation of the
    noise in the last model, relative to the clip.
    """
    from raydfl.data import build_population  # PyTorch takes seconds
    from raydfl.engine import (
        STUDY,
        Clients,
        count_parameters,
        expect_steps,
        load_config,
        plan_examples,
        plan_mechanism,
        sum_deviation,
    )
    from raydfl.rules import Gaussian

    config = load_config(file, overrides or [])
    rule, by_clip = config.components.rule, config.train.optimiser.private is not None
    if not isinstance(rule, Gaussian) and not by_clip:
        raise ConfigError(
            f"method.rule: {type(rule).__name__} gives no differential privacy. Set method.rule to "
            f"{{name: gaussian, clip: ..., noise: ...}}, or set train.optimiser.private."
        )
    if config.data.sites:
        raise ConfigError(
            "data.sites: the clients are known only at the sites. Remove it, or start the run to see its epsilon."
        )
    with show_progress(quiet=True, as_json=False) as progress:
        population = build_population(
            config.data, config.run.seed, progress, attack=config.components.attack, labels_needed=config.labels_needed
        )
    clients, rounds = Clients(population, config), config.train.rounds
    parameters = count_parameters(config, clients)
    if by_clip:
        by_example, counts = plan_examples(config, population, clients)
        steps = {(clips, expect_steps(config, clips, clients.eligible)): number for clips, number in counts.items()}
        _print_examples(by_example, steps, parameters)
    else:
        summed = sum_deviation(cast(Gaussian, rule).bands, rounds)
        _print_clients(plan_mechanism(config, clients.eligible), rounds, parameters, summed)
    if config.privacy.key == "seed":
        print(f"every epsilon is {STUDY}")  # noqa: T201


def _print_clients(mechanism: Any, rounds: int, parameters: int, summed: float) -> None:
    """Print the epsilon of each noise with the rule gaussian.

    Args:
        mechanism: Mechanism of the run (``raydfl.engine.accounting.Mechanism``).
        rounds: Number of rounds.
        parameters: Number of elements with noise.
        summed: Standard deviation of the sum of all rounds' noise, relative to one round's independent noise.
    """
    console, sampling = (
        Console(highlight=False),
        "by Poisson sampling" if mechanism.draw == "poisson" else "of fixed number",
    )
    lines = [
        f"{mechanism.clients:,} clients, {mechanism.cohort:,} a round {sampling}, {rounds} rounds, {parameters:,} parameters",
        f"a client takes part in one of {mechanism.rest} rounds" * (mechanism.rest > 1),
        f"{mechanism.assumption}, in a run with {mechanism.simulated}" * bool(mechanism.simulated),
        f"delta {mechanism.delta:.3g}, neighbours: {mechanism.neighbours}",
    ]
    console.print("\n".join(filter(None, lines)), markup=False)
    table = Table("noise", "epsilon", "signal / noise", "last model", "", box=None, pad_edge=False)
    for noise in sorted({*_NOISES, mechanism.noise}):
        row = dataclasses.replace(mechanism, noise=noise)
        mark = "this configuration" if noise == mechanism.noise else ""
        epsilon, ratio = row.compute_epsilon(rounds), row.compute_ratio(parameters)
        table.add_row(
            f"{noise:.4g}", f"{epsilon:.3g}", f"{ratio:.3g}", f"{noise * summed / mechanism.cohort:.3g}", mark
        )
    console.print(table)
    if mechanism.compute_ratio(parameters) < 1:
        needed = math.ceil(mechanism.noise * math.sqrt(parameters))
        console.print(
            f"warning: this federation is too small. The noise of a round is {1 / mechanism.compute_ratio(parameters):.3g} times "
            f"as large as the largest possible sum of its clients. They are equal with {needed:,} clients a round, or with fewer "
            f"parameters.",
            markup=False,
            soft_wrap=True,
        )


def _print_examples(mechanism: Any, steps: Mapping[tuple[int, int], int], parameters: int) -> None:
    """Print the epsilon of each noise with train.optimiser.private.

    Args:
        mechanism: Mechanism of the run (``raydfl.engine.accounting.ExampleMechanism``).
        steps: Number of clients by clips and steps.
        parameters: Number of elements with noise.
    """
    console, fewest, most = Console(highlight=False), min(steps), max(steps)
    console.print(
        f"{sum(steps.values())} clients with {_format_range(fewest[0], most[0])} clips, {mechanism.batch} a step by Poisson "
        f"sampling, {_format_range(fewest[1], most[1])} steps, {parameters:,} parameters\n"
        f"delta {mechanism.delta:.3g}, neighbours: {mechanism.neighbours}",
        markup=False,
        soft_wrap=True,
    )
    table = Table("noise", "epsilon, largest", "epsilon, median", "signal / noise", "", box=None, pad_edge=False)
    for noise in sorted({*_NOISES, mechanism.noise}):
        largest, median = dataclasses.replace(mechanism, noise=noise).summarise(steps)
        ratio = mechanism.batch / (noise * math.sqrt(parameters)) if noise else math.inf
        mark = "this configuration" if noise == mechanism.noise else ""
        table.add_row(f"{noise:.4g}", f"{largest:.3g}", f"{median:.3g}", f"{ratio:.3g}", mark)
    console.print(table)
    console.print("Each client takes part in the expected number of rounds.")


def _format_range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def audit_command(
    directory: RunDir,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Test the differential privacy of the run by attacks. Exit code 1: the run reveals more than its epsilon allows.

    The membership attack compares the losses of training clips and held-out clips. A run with the rule gaussian also needs the
    attack canary: the audit redraws the canaries' directions and compares them with the movement of the global model. With
    data.corrupt.canaries the audit guesses from the losses of the canary clips which of them were in the training data, also in a
    run without differential privacy. It trains nothing.
    """
    from raydfl.data import Population  # PyTorch takes seconds
    from raydfl.engine import audit_model, describe_run, measure_clients, measure_examples
    from raydfl.engine.storage import final_commit, local_run, read_about, read_config
    from raydfl.runs.inference import audit_clips, measure_membership

    folder = local_run(directory)
    config, stored = read_config(folder, trust), read_about(folder).get("privacy")
    has_canary_clips = not config.data.parts and config.data.corrupt.canaries is not None
    if stored is None and not has_canary_clips:
        raise InputError(
            f"{directory} has no differential privacy to audit. Train it with method.rule={{name: gaussian, ...}} or "
            f"train.optimiser.private={{noise: ...}}, or with data.corrupt.canaries={{clips: 100}}"
        )
    state, console = final_commit(folder).state, Console(highlight=False)
    audit, clips, promised = None, audit_clips(folder, trust) if has_canary_clips else None, math.inf
    text = "nothing, because the run has no differential privacy"
    if stored is not None and stored.get("unit") == "clip":
        promised, _, text = measure_examples(folder, stored, state.round_index)
        if clips is not None:
            promised = measure_clients(folder, stored, state.round_index, clips.clients)
    elif stored is not None:
        promised, text = describe_run(stored, state.round_index)
        population = Population.load(folder / "population", features=False)
        audit = audit_model(config, population, state, stored["delta"])
    bound = clips.found.lower_bound if clips is not None else 0.0
    bound = bound if audit is None else audit.canaries.compute_lower_bound()
    violated = bound > promised
    membership, reason = None, ""
    try:
        membership = measure_membership(folder, trust)
    except InputError as error:  # the canaries need neither labels nor features
        reason = str(error)
    if as_json:
        measured = None if membership is None else dataclasses.asdict(membership)
        canaries = {} if audit is None else audit.to_dict()
        canary_clips = {} if clips is None else {"canary_clips": clips.to_dict()}
        promise = promised if math.isfinite(promised) else None  # JSON has no infinity
        warning = {} if stored is None or not stored.get("warning") else {"warning": stored["warning"]}
        values = {
            "promised": promise,
            **warning,
            "violated": violated,
            **canaries,
            **canary_clips,
            "membership": measured,
        }
        print(json.dumps(values))  # noqa: T201
    else:
        console.print(f"promised: {text}", markup=False, soft_wrap=True)
        if audit is not None:
            _print_canaries(audit, console)
        if clips is not None:
            _print_clips(clips, console)
        if stored is not None and (audit is not None or clips is not None):
            limit = f"{bound:.3g} exceeds {promised:.3g}" if violated else f"{bound:.3g} is within {promised:.3g}"
            of = "" if clips is None else ", the largest epsilon of the clients with canary clips"
            console.print(f"{'violated' if violated else 'not violated'}: the lower bound {limit}{of}.", soft_wrap=True)
        if clips is not None and clips.largest <= promised < math.inf:
            console.print(
                "warning: this audit cannot fail, because its largest possible lower bound is within the promise. Use more canary "
                "clips.",
                soft_wrap=True,
            )
        if membership is None:
            console.print(f"membership: not measured. {reason}", markup=False, soft_wrap=True)
        else:
            console.print(
                f"membership: AUC {membership.auc:.3f}, 95 % interval {membership.low:.3f} to {membership.high:.3f} (losses of "
                f"{membership.members} training clips and {membership.others} held-out clips; 0.5: no difference)",
                soft_wrap=True,
            )
    if violated:
        raise typer.Exit(1)


def _print_clips(audit: Any, console: Console) -> None:
    """Print the guesses of canary clips and of the control (``raydfl.runs.inference.ClipAudit``)."""
    table = Table("canary clips", "guesses", "correct", "95 % lower bound", box=None, pad_edge=False)
    included = f"{audit.included} of {audit.clips} trained"
    for name, guesses in ((included, audit.found), ("control, fresh coins", audit.control)):
        table.add_row(name, str(guesses.guesses), str(guesses.correct), f"{guesses.lower_bound:.3g}")
    console.print(table)
    console.print(
        f"Largest possible lower bound with {audit.clips} canary clips and delta {audit.delta:.3g}: {audit.largest:.3g}.",
        soft_wrap=True,
    )


def _print_canaries(audit: Any, console: Console) -> None:
    """Print the cosines of canaries and of the control (``raydfl.engine.privacy_audit.Audit``)."""
    table = Table(
        "directions", "number", "mean cosine", "deviation", "epsilon", "95 % lower bound", box=None, pad_edge=False
    )
    for name, cosines in (("canaries", audit.canaries), ("control, never sent", audit.control)):
        row = (cosines.mean, cosines.deviation, cosines.estimate_epsilon(), cosines.compute_lower_bound())
        table.add_row(name, str(len(cosines.values)), *(f"{value:.3g}" for value in row))
    console.print(table)
    console.print(
        f"Cosines without any influence: 0 ± {audit.canaries.parameters**-0.5:.3g} ({audit.canaries.parameters:,} parameters)."
    )
