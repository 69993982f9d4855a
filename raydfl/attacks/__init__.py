"""Simulated attackers, for measuring the robustness of methods and rules.

Each attack is a file of this room; the file's name is the attack's name in a configuration. To write an attack, subclass
:class:`Attack`, :class:`UpdateAttack` or :class:`ColludingAttack`.

Imports methods, training, data, rules and core. Begin with label_flip.py (recordings and labels), sign_flip.py
(updates of single attackers) and alie.py (colluding attackers).
"""

from raydfl.attacks._attack import Attack, Cohort, ColludingAttack, UpdateAttack
from raydfl.attacks._statistics import HonestUpdates
from raydfl.attacks.canary import Canary, draw_direction

__all__ = ["Attack", "Canary", "Cohort", "ColludingAttack", "HonestUpdates", "UpdateAttack", "draw_direction"]
