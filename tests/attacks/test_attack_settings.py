"""Settings of the group ``attack``: syntax, effects and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raydfl.attacks.backdoor import Backdoor
from raydfl.attacks.sign_flip import SignFlip
from raydfl.cli.explain import explain_config, explain_methods
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.yaml import parse_yaml
from raydfl.engine.config import Config, make_config
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]
IDS = [f"c{i}" for i in range(20)]


def test_an_attack_is_set_by_its_name_or_by_single_options(tiny: Tiny) -> None:
    assert tiny("attack=sign_flip").components.attack == SignFlip()
    assert tiny("attack=sign_flip", "attack.clients=3", "attack.scale=2").components.attack == SignFlip(
        clients=3, scale=2.0
    )
    assert tiny("attack=sign_flip", "attack=null").components.attack is None
    assert tiny().components.attack is None


def test_the_digest_depends_on_the_attack_and_is_unchanged_without_an_attack(tiny: Tiny) -> None:
    honest = tiny().digest()
    assert tiny("attack=null").digest() == honest
    digests = {
        tiny(f"attack={attack}").digest()
        for attack in ("sign_flip", "ipm", "{name: sign_flip, scale: 2}", "{name: sign_flip, clients: 0.3}")
    }
    assert len(digests | {honest}) == 5
    assert tiny("attack={name: sign_flip, clients: 0.2, draw: run}").digest() == tiny("attack=sign_flip").digest()


def test_the_printed_configuration_explains_the_attack_and_can_be_run(tiny: Tiny) -> None:
    for overrides in ((), ("attack={name: backdoor, target: tone1, share: 0.25}",)):
        config = tiny(*overrides)
        text = explain_config(config)
        assert make_config(parse_yaml(text, "printed")).digest() == config.digest()
    assert "# Fraction of an attacker's training clips with the trigger. 0: none. Range: 0 to 1.\n  share: 0.25" in text
    assert "  clients: 0.2" in text


def test_attacks_are_listed_with_their_options() -> None:
    text = explain_methods(120)
    assert "alie: A Little Is Enough" in text
    assert 'knowledge = "all": Knowledge of the attackers.' in text


def test_a_user_defined_attack_is_loaded_from_its_file(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from pydantic.dataclasses import dataclass\n"
        "from raydfl.attacks._attack import UpdateAttack\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Zero(UpdateAttack):\n"
        "    def change(self, change, cohort, rng):\n"
        "        return np.zeros(len(change))\n"
    )
    attack = tiny(f"attack={tmp_path / 'mine.py'}:Zero").components.attack
    assert type(attack).__name__ == "Zero"


def test_a_trigger_file_is_found_from_any_folder(tiny: Tiny) -> None:
    attack = tiny("attack={name: backdoor, target: tone1, file: sound.wav}").components.attack
    assert isinstance(attack, Backdoor)
    assert attack.file == Path("sound.wav").resolve()


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("sign_flop", "unknown attack 'sign_flop'. Did you mean 'sign_flip'"),
        ("{clients: 0.2}", "attack: a name is missing. Choose one of alie, backdoor"),
        ("{name: sign_flip, scal: 2}", "attack: unknown key 'scal' for SignFlip. Did you mean 'scale'"),
        ("{name: sign_flip, scale: -1}", "attack.scale: Input should be greater than or equal to 0"),
        ("{name: sign_flip, clients: 1.5}", "a share of the clients must be between 0.0 and 1.0"),
        ("{name: sign_flip, clients: -1}", "a number of clients must be at least 0"),
        ("{name: sign_flip, start: 5, stop: 3}", "stop 3 is before start 5"),
        ("{name: sign_flip, draw: always}", "attack.draw: Input should be 'run' or 'round'"),
        ("{name: ipm, knowledge: most}", "attack.knowledge: Input should be 'all' or 'own'"),
        ("{name: backdoor}", "attack.target: Field required"),
        (
            "{name: backdoor, target: a, position: middle}",
            "attack.position: Input should be a valid number or 'random'",
        ),
        ("5", "attack: Input should be a valid dictionary"),
    ],
)
def test_invalid_settings_are_rejected(tiny: Tiny, attack: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(f"attack={attack}")
    assert message in str(error.value)


def test_a_run_with_more_attackers_than_clients_is_rejected(tiny: Tiny) -> None:
    with pytest.raises(DataError, match="attack: 9 clients are to be attackers, but the federation has 6"):
        create(tiny("attack={name: ipm, clients: 9}"), Progress("quiet"))


def test_the_attackers_depend_only_on_the_seed_and_the_round() -> None:
    fixed, drawn = SignFlip(clients=0.25, start=2, stop=4), SignFlip(clients=5, draw="round")
    assert [int(fixed.attackers(IDS, 1, r).sum()) for r in range(6)] == [0, 5, 5, 5, 0, 0]
    np.testing.assert_array_equal(fixed.attackers(IDS, 1, 1), fixed.attackers(IDS, 1, 3))
    np.testing.assert_array_equal(fixed.attackers(IDS, 1, 1), fixed.candidates(IDS, 1))
    assert (fixed.attackers(IDS, 1, 1) != fixed.attackers(IDS, 2, 1)).any()
    assert (drawn.attackers(IDS, 1, 0) != drawn.attackers(IDS, 1, 1)).any()
    np.testing.assert_array_equal(drawn.attackers(IDS, 1, 1), drawn.attackers(IDS, 1, 1))
    assert drawn.candidates(IDS, 1).all()
    assert not SignFlip(clients=0, draw="round").candidates(IDS, 1).any()
    named = SignFlip(clients=("c3", "c7"), draw="round")
    assert np.flatnonzero(named.candidates(IDS, 1)).tolist() == [3, 7]
