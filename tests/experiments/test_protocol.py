"""The protocol of confirmatory studies: conclusions, plateau, controls, tuning, and results as JSON files."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import Raydfl
from scipy import stats
from studies import StudyFile, write_run_folder

from raydfl.controls import Control, to_json
from raydfl.core.errors import ConfigError, InputError, RunDirectoryError
from raydfl.experiments.federation import TrialOrder
from raydfl.experiments.load import load_study
from raydfl.experiments.notes import describe_results
from raydfl.experiments.page import draw_by_bytes, draw_curves
from raydfl.experiments.records import check_results, load_result, make_result, write_result
from raydfl.experiments.results import StudyResults, collect
from raydfl.experiments.state import StudyState
from raydfl.experiments.statistics import Difference, Spread, describe_difference, find_significant
from raydfl.experiments.study import Study
from raydfl.experiments.tables import make_controls_table, make_full_table, markdown
from raydfl.runs import run
from raydfl.runs.report import Curve, PlateauSettings, find_plateau, read_run

ROUNDS = 12
PROTOCOL: dict[str, Any] = {
    "question": "Does FedProx score higher than FedAvg?",
    "control": {"method": "FedAvg"},
    "difference": 2,
    "plateau": {"evaluations": 3, "rise": 1},
    "repeat": {"run.seed": [1, 2, 3, 4, 5]},
    "settings": {"train.rounds": ROUNDS, "data.split.validation": 0.25},
}


def make_difference(*differences: float) -> Difference:
    scores = {f"run.seed={index}": value for index, value in enumerate(differences)}
    difference = Difference.between(Spread(scores), Spread(dict.fromkeys(scores, 0.0)))
    assert difference is not None
    return difference


def make_curve(*values: float) -> Curve:
    return Curve(np.arange(1.0, len(values) + 1), np.array(values), np.zeros(len(values)))


def read_results(study: Study) -> StudyResults:
    return collect(study, StudyState.read(study))


# -- conclusions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "text"), [([1.0, 3.0], "2.00 ± 1.41"), ([3.0], "3.00"), ([1.0, math.nan], "-")])
def test_a_spread_is_mean_and_deviation(values: list[float], text: str) -> None:
    assert str(Spread({f"run.seed={index}": value for index, value in enumerate(values)})) == text


def test_three_differences_by_hand() -> None:
    # 2, 3 and 4: mean 3, standard deviation 1, standard error 0.577; t(0.975, 2) is 4.303, so the interval is 3 ± 2.48.
    difference = make_difference(2, 3, 4)
    assert difference.low == pytest.approx(3 - 4.3027 / math.sqrt(3), abs=1e-4)
    assert describe_difference(difference, True, comparisons=1, smallest=2) == "better"
    assert describe_difference(difference, True, comparisons=1, smallest=2, sign=-1) == "worse"
    # t(1 - 0.05 / 5 / 2, 2) is 9.92, so the interval with Bonferroni's correction is 3 ± 5.73.
    assert difference.correct(5) == pytest.approx((3 - 9.9248 / math.sqrt(3), 3 + 9.9248 / math.sqrt(3)), abs=1e-3)
    assert describe_difference(difference, False, comparisons=5, smallest=2) == "perhaps better"


@pytest.mark.parametrize(
    ("differences", "conclusion"),
    [
        ((1.0, 1.1, 0.9), "better (difference below 2)"),
        ((1.5, 1.9, 1.7), "better"),  # the interval, 1.7 ± 0.50, includes 2
        ((0.1, -0.1, 0.05), "no difference seen (difference below 2)"),
        ((5.0, -5.0, 1.0), "no difference seen"),
        ((3.0,), "one pair, so no interval"),
    ],
)
def test_conclusions_name_the_size_of_a_difference(differences: tuple[float, ...], conclusion: str) -> None:
    difference = make_difference(*differences)
    assert describe_difference(difference, difference.p_value < 0.05, comparisons=1, smallest=2) == conclusion


def test_p_values_equal_scipys_and_exclude_0_from_the_interval() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.normal(0.5, 1.0, 6)
        difference = make_difference(*values)
        assert difference.p_value == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
        for comparisons in (1, 3, 10):
            low, high = difference.correct(comparisons)
            assert (low > 0 or high < 0) == (difference.p_value < 0.05 / comparisons)
    assert make_difference(2, 2, 2).p_value == 0
    assert make_difference(0, 0, 0).p_value == 1


@pytest.mark.parametrize(
    ("p_values", "comparisons", "expected"),
    [
        ((0.01, 0.02, 0.03), 3, {0, 1, 2}),  # levels 0.05 / 3, 0.05 / 2 and 0.05. Bonferroni's: the first alone
        ((0.045, 0.01, 0.04), 3, {1}),  # 0.04 exceeds 0.05 / 2, so 0.045 is not significant
        ((0.01, 0.02), 4, {0}),  # two unknown: levels 0.05 / 4 and 0.05 / 3
        ((math.nan, 0.01), 2, {1}),
        ((), 3, set()),
    ],
)
def test_holms_correction(p_values: tuple[float, ...], comparisons: int, expected: set[int]) -> None:
    assert find_significant(dict(enumerate(p_values)), comparisons) == expected


# -- plateau ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ((10, 50, 80, 80.5, 80.9, 80.2, 80.1), 2),
        ((10, 50, 80, 80.5, 81, 80.2, 80.1, 80, 79), 3),
        ((10, 20, 30, 40, 50, 60, 70), None),
        ((80, 80, 80), None),
        ((float("nan"), 50, 50, 50, 50), 1),
        ((10, 10, 10, 10, 10, 50, 80, 80, 80, 80), 6),  # flat at chance, before learning begins
        ((10, 50, 50, 50, 50, 60, 60), None),  # only one evaluation after the last rise
    ],
)
def test_the_plateau_is_the_first_evaluation_without_a_later_rise(values: tuple[float, ...], place: int | None) -> None:
    assert find_plateau(make_curve(*values), PlateauSettings(evaluations=3, rise=1.0)) == place


def test_the_plateau_of_a_loss_is_the_end_of_its_fall() -> None:
    assert find_plateau(make_curve(5, 3, 1, 1, 1, 1), PlateauSettings(evaluations=3, rise=0.5), sign=-1) == 2


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"control": None}, "control: a confirmatory study needs a decisive control"),
        ({"question": None}, "question: a confirmatory study states its question"),
        (
            dict.fromkeys(["difference", "plateau", "controls", "tuned"]),
            "difference: a confirmatory study states the smallest difference of interest. Set it, or set exploratory: true.",
        ),
        ({"difference": None}, "difference: a confirmatory study states the smallest difference"),
        ({"plateau": None}, "plateau: a confirmatory study needs a rule"),
        (
            {"repeat": {"run.seed": [1, 2, 3]}},
            "requires at least 5 repeats, not 3. Add seeds, or set exploratory: true.",
        ),
        ({"summary": "best"}, "summary: best selects evaluations on the test data"),
        (
            {"settings": {"data.split.validation": 0.0}},
            "plateau: the rule needs held-out data",
        ),
        ({"controls": ["chanse"]}, "there is no control 'chanse'. Did you mean 'chance'?"),
        ({"controls": ["compute_matched"]}, "controls.compute_matched needs settings"),
        ({"controls": {"raw": {"train.rounds": 3}}}, "controls.raw trains nothing"),
        ({"controls": ["fedavg_fine_tuned"]}, "measured on the clients' own clips. Set metric.split: client_test"),
        (
            {
                "axes": {
                    "method": {
                        "FedAvg": {},
                        "own": {"metric": {"model": "personal"}, "evaluate.fine_tune": {"epochs": 1}},
                    }
                }
            },
            "metric: no difference follows from scores of different names",
        ),
        (
            {"metric": {"split": "client_test"}, "settings": {"data.split.validation": 0.0}},
            "plateau: the rule needs held-out data",
        ),
        (
            {"settings": {**PROTOCOL["settings"], "evaluate.clients": "none"}},
            "held-out data and their evaluation. Set data.split.validation and evaluate.clients: cohort or all",
        ),
        (
            {"metric": {"score": "attack_success", "split": "triggered"}},
            "plateau: attack_success is not measured on held-out data. Set plateau.score, for example to accuracy.",
        ),
        (
            {"plateau": {"evaluations": 3, "rise": 1, "score": "acuracy"}},
            "plateau.score: nothing measures 'acuracy'. Did you mean 'accuracy'?",
        ),
        ({"metric": {"score": "acuracy"}}, "metric.score: nothing measures 'acuracy'"),
        ({"also": [{"score": "acuracy"}]}, "also.score: nothing measures 'acuracy'"),
        ({"metric": {"model": "plugn"}}, "FedAvg: metric.model: there is no model 'plugn'"),
        ({"axes": {"method": {"FedAvg": {}, "often": {"evaluate.every": 2}}}}, "evaluations differ"),
        (
            {"domains": {"train.optimiser.lr": {"uniform": [0.1, 0.2]}}},
            "selects settings, so it cannot be confirmatory",
        ),
    ],
)
def test_a_study_that_breaks_the_protocol_ends_with_exit_code_2(
    grid: StudyFile, raydfl: Raydfl, changes: dict[str, Any], message: str
) -> None:
    result = raydfl("study", grid(**PROTOCOL | changes), "--check")
    assert (result.code, message in result.err) == (2, True), result.err


def test_scores_of_a_users_objective_are_not_checked(grid: StudyFile, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from raydfl import Objective\n\n\n"
        "class Own(Objective):\n"
        "    def loss(self, step, name, batch):\n        return batch.mean(step.forward(name, batch).mean(dim=1))\n\n"
        "    def metrics(self, outputs, examples):\n        return {'own_score': outputs.mean(dim=1).numpy()}\n"
    )
    settings = {**PROTOCOL["settings"], "objective": f"{file}:Own"}
    study = load_study(grid(**PROTOCOL | {"metric": {"score": "own_score"}, "settings": settings}))
    assert study.first.metric.score == "own_score"


def test_an_exploratory_study_reports_it_on_its_page(grid: StudyFile) -> None:
    for changes in ({"exploratory": True, "difference": 2}, {"exploratory": True, "question": "Why?"}, {}):
        study = load_study(grid(**changes))
        assert not study.settings.confirmatory
        assert "Exploratory: the study draws no conclusions." in describe_results(read_results(study))


def test_trained_controls_are_labels_with_the_settings_of_the_control(grid: StudyFile) -> None:
    names = ["chance", "untrained", "local", "centralised", "fedavg"]
    study = load_study(grid(**PROTOCOL | {"controls": names}))
    first = {trial.labels: trial.config for trial in reversed(study.trials)}
    methods = [labels[1] for labels in first if labels[0] == "clean"]
    assert sorted(methods) == sorted(["FedAvg", "FedProx", "fast", "untrained", "local only", "centralised"])
    assert first["wrong", "local only"].method == {"name": "fedper", "personal": ["model"]}
    assert first["wrong", "local only"].data.corrupt.labels is not None  # the settings of the other axis
    assert first["clean", "centralised"].data.partition.clients == 1
    assert first["clean", "untrained"].train.rounds == 1


def test_a_matched_control_has_the_users_settings(grid: StudyFile) -> None:
    study = load_study(grid(**PROTOCOL | {"controls": {"compute_matched": {"train.local_epochs": 3}}}))
    assert {trial.config.train.local_epochs for trial in study.trials if "compute-matched" in trial.labels} == {3}


# -- results ---------------------------------------------------------------------------------------------------------


def finish(study: Study, scores: dict[str, float]) -> None:
    """Write run folders with a rise to ``scores[method]`` plus seed / 100 in round 4."""
    for trial in study.trials:
        level = scores[trial.labels[-1]] + trial.config.run.seed / 100
        values = [level * min(1.0, at / 4) for at in range(1, trial.config.train.rounds + 1)]
        write_run_folder(trial, {"test model/accuracy": values, "validation model/accuracy": values})


@pytest.fixture(name="finished_study")
def finish_study(grid: StudyFile) -> Study:
    study = load_study(grid(**PROTOCOL | {"results": "results"}))
    finish(study, {"FedAvg": 0.5, "FedProx": 0.6, "fast": 0.5})
    return study


@pytest.mark.slow
def test_tables_from_json_files_equal_tables_from_run_folders(finished_study: Study) -> None:
    before = read_results(finished_study)
    text = markdown(before)
    shutil.rmtree(finished_study.folder)
    study = load_study(finished_study.file)
    assert all(trial.finished for trial in study.trials)
    assert markdown(read_results(study)) == text
    assert study.results_folder is not None
    assert len(list(study.results_folder.glob("*.json"))) == len(study.distinct)


def test_conclusions_of_a_table(finished_study: Study) -> None:
    results = read_results(finished_study)
    conclusions = {contestant.labels: contestant.conclusion for contestant in results.contestants}
    assert conclusions["clean", "FedProx"] == "better"
    assert "no difference seen" in conclusions["clean", "fast"]
    assert conclusions["clean", "FedAvg"] == ""
    assert results.plateaus == {contestant.labels: 4 for contestant in results.contestants}
    headings, lines = make_full_table(results)
    plateau = [line[headings.index("at plateau")] for line in lines if line[:2] == ["clean", "FedProx"]]
    assert plateau == ["63.00 ± 1.58"]  # the mean over seeds 1 to 5 of 60 + seed
    notes = " ".join(describe_results(results))
    assert "(4 comparisons)" in notes
    assert "Controls outside the study: chance, majority, raw" in notes


def test_pairs_of_different_processors_are_counted(finished_study: Study) -> None:
    """Ten pairs of FedProx with FedAvg and ten of the fast FedAvg; a run of FedAvg has two of them."""
    read_results(finished_study)
    assert not any("different commits" in note for note in describe_results(read_results(finished_study)))
    trial = next(trial for trial in finished_study.trials if trial.labels == ("clean", "FedAvg"))
    assert trial.result_file is not None
    values = json.loads(trial.result_file.read_text())
    values["provenance"]["processor"] = "an abacus"
    trial.result_file.write_text(json.dumps(values))
    notes = describe_results(read_results(finished_study))
    assert any(note.startswith("2 of 20 pairs with the control compare runs of different commits") for note in notes)


def test_further_pairs_are_compared_and_counted(finished_study: Study) -> None:
    """FedProx and the fast FedAvg, in two data sets: two comparisons beside the four with the control."""
    values = yaml.safe_load(finished_study.file.read_text())
    values["compare"] = [[{"method": "FedProx"}, {"method": "fast"}]]
    finished_study.file.write_text(yaml.safe_dump(values))
    results = read_results(load_study(finished_study.file))
    by_labels = {contestant.labels: contestant for contestant in results.contestants}
    assert results.study.comparisons == 4
    assert results.further.keys() == {"FedProx minus fast (clean)", "FedProx minus fast (wrong)"}
    difference, conclusion = results.further["FedProx minus fast (clean)"]
    scores = [by_labels["clean", name].score("tail").values for name in ("FedProx", "fast")]
    assert difference.mean == pytest.approx(np.mean(np.subtract(*scores)))
    assert conclusion == "better"
    assert f"FedProx minus fast (clean): {difference}, n = 5: better." in describe_results(results)
    finished_study.file.write_text(yaml.safe_dump(values | {"exploratory": True}))
    notes = describe_results(read_results(load_study(finished_study.file)))
    assert f"FedProx minus fast (clean): {difference}, n = 5." in notes  # without a conclusion
    finished_study.file.write_text(yaml.safe_dump(values))
    part = load_study(finished_study.file, only=["condition=clean", "method=FedAvg,FedProx"])
    assert part.comparisons == 4  # the planned ones, so that a selection is not corrected less
    for pair, message in (
        ([{"method": "FedProx"}, {"condition": "clean"}], "compare: the pair 0 must name equal axes"),
        ([{"rule": "a"}, {"rule": "b"}], "compare: there is no axis 'rule'"),
        ([{"method": "FedProx"}, {"method": "slow"}], "compare: axis 'method' has no label 'slow'"),
    ):
        values["compare"] = [pair]
        finished_study.file.write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError, match=message):
            load_study(finished_study.file)


def test_results_do_not_depend_on_the_place_of_the_data_or_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "studies" / "fedmlac_private.yaml"
    here = load_study(file, ["data.root=here/fsdd"]).trials
    monkeypatch.chdir(tmp_path)
    there = load_study(file, ["data.root=there/fsdd"]).trials
    assert [trial.result for trial in here] == [trial.result for trial in there]
    assert len({trial.result for trial in here}) == len(here)
    assert here[0].config.digest() != there[0].config.digest()


def test_unfinished_contestants_have_no_conclusion(finished_study: Study) -> None:
    last = next(trial for trial in reversed(finished_study.trials) if trial.labels == ("clean", "FedProx"))
    shutil.rmtree(last.run_dir)
    conclusions = {contestant.labels: contestant.conclusion for contestant in read_results(finished_study).contestants}
    assert conclusions["clean", "FedProx"] == "unfinished"
    assert conclusions["wrong", "FedProx"] == "better"


def test_the_plateau_of_the_mean_curve_lasts_to_the_end(grid: StudyFile) -> None:
    """FedAvg's held-out scores rise until round 3 with odd seeds, until round 5 with even seeds. The mean rises until round 5.

    Test scores fall by 10 in each round from round 6 on. FedProx has no plateau, and the label "fast" no held-out score.
    """
    study = load_study(grid(**PROTOCOL | {"results": "results"}))
    rounds = np.arange(1, study.rounds + 1)
    for trial in study.trials:
        end = {"FedAvg": 5 - 2 * (trial.config.run.seed % 2), "FedProx": study.rounds}.get(trial.labels[1], 1)
        scores = {"test model/accuracy": 0.9 - 0.1 * np.maximum(0, rounds - 5)}
        if trial.labels[1] != "fast":
            scores["validation model/accuracy"] = 0.1 * np.minimum(rounds, end)
        write_run_folder(trial, {name: values.tolist() for name, values in scores.items()})
    results = read_results(study)
    assert {labels[1]: at for labels, at in results.plateaus.items()} == {"FedAvg": 5, "FedProx": None}
    headings, lines = make_full_table(results)
    column = {line[1]: line[headings.index("at plateau")] for line in lines}
    expected = 90 - 10 * np.arange(study.rounds - 4).mean()
    assert column == {"FedAvg": f"{expected:.2f} ± 0.00", "FedProx": "-", "fast": "-"}
    notes = describe_results(results)
    assert "Unfinished training, still improving in the last 3 evaluations: clean, FedProx; wrong, FedProx." in notes
    assert any(note.startswith("No held-out score,") and note.endswith(": clean, fast; wrong, fast.") for note in notes)


def test_the_plateau_of_another_score(grid: StudyFile) -> None:
    """The accuracy on held-out clips rises until round 4. The success of the attack, smaller is better, falls to the end."""
    changes = {"metric": {"score": "attack_success", "split": "triggered", "mode": "min"}, "controls": ["chance"]}
    plateau = {"evaluations": 3, "rise": 1, "score": "accuracy"}
    study = load_study(grid(**PROTOCOL | changes | {"plateau": plateau, "results": "results"}))
    rounds = np.arange(1, study.rounds + 1)
    for trial in study.trials:
        scores = {
            "triggered model/attack_success": 0.9 - 0.05 * rounds,
            "validation model/accuracy": 0.1 * np.minimum(rounds, 4),
        }
        write_run_folder(trial, {name: values.tolist() for name, values in scores.items()})
    results = read_results(study)
    assert set(results.plateaus.values()) == {4}
    note = "Plateau, the round after which the best held-out accuracy improves by less than 1"
    assert any(line.startswith(note) for line in describe_results(results))


def test_rounding_does_not_decide_the_plateau() -> None:
    """A rise of exactly 1 ends a plateau. As a mean of runs in another order, the rise may be 0.9999999999999991."""
    for error in (-1e-13, 0, 1e-13):
        curve = make_curve(10, 79.3 + error, 80.3, 80.3, 80.3, 80.3)
        assert find_plateau(curve, PlateauSettings(evaluations=3, rise=1.0)) == 2


def test_differences_with_a_large_spread_are_undecided(grid: StudyFile) -> None:
    """FedProx differs from FedAvg by -5, 5, -5, 5 and -5: mean -1, standard deviation sqrt(120 / 4)."""
    study = load_study(grid(**PROTOCOL | {"results": "results"}))
    for trial in study.trials:
        sign = -1 if trial.config.run.seed % 2 else 1
        level = 0.5 + sign * 0.05 * (trial.labels == ("clean", "FedProx"))
        values = [level] * trial.config.train.rounds
        write_run_folder(trial, {"test model/accuracy": values, "validation model/accuracy": values})
    notes = describe_results(read_results(study))
    assert [note.rpartition(": ")[2] for note in notes if note.startswith("Undecided")] == ["clean, FedProx (5.5)."]


def test_notes_name_the_conclusions_that_the_last_evaluation_changes(grid: StudyFile) -> None:
    """FedAvg scores 50 + seed. FedProx scores 40 + seed, in the last of 12 evaluations 60 + seed.

    Its mean of the last ten is (9 x 40 + 60) / 10 = 42: 8 below FedAvg, but in the last evaluation 10 above it.
    """
    study = load_study(grid(**PROTOCOL | {"results": "results"}))
    for trial in study.trials:
        seed, slow = trial.config.run.seed / 100, trial.labels == ("clean", "FedProx")
        values = [0.4 + seed if slow else 0.5 + seed] * (ROUNDS - 1) + [0.6 + seed if slow else 0.5 + seed]
        write_run_folder(trial, {"test model/accuracy": values, "validation model/accuracy": values})
    results = read_results(study)
    conclusions = {contestant.name: contestant.conclusion for contestant in results.contestants}
    assert conclusions["clean, FedProx"] == "worse"
    (last,) = results.changed
    assert last.difference is not None
    assert (last.name, last.conclusion, round(last.difference.mean, 6)) == ("clean, FedProx", "better", 10)
    (note,) = [note for note in describe_results(results) if note.startswith("Other conclusions in the last")]
    assert note.endswith(": clean, FedProx +10.00 [+10.00, +10.00], better.")


@pytest.mark.slow
def test_a_contestant_at_chance_did_not_learn_and_has_no_rank(finished_study: Study) -> None:
    for trial in finished_study.trials:
        write_result(finished_study, trial)
        assert trial.result_file is not None
        values = json.loads(trial.result_file.read_text())
        error = 0.04 if trial.labels[0] == "clean" else 0.01
        values["controls"] = [
            {
                "name": "chance",
                "split": "test",
                "metric": "accuracy",
                "value": 0.47,
                "count": 100,
                "standard_error": error,
            },
            {
                "name": "raw features: linear",
                "split": "test",
                "metric": "accuracy",
                "value": 0.7,
                "count": 100,
                "standard_error": 0.05,
            },
        ]
        trial.result_file.write_text(json.dumps(values))
    results = read_results(finished_study)
    learned = {contestant.labels: contestant.learned for contestant in results.contestants}
    # FedAvg scores 53: below 47 + 2 x 4, above 47 + 2 x 1.
    assert learned == {
        ("clean", "FedAvg"): False, ("clean", "FedProx"): True, ("clean", "fast"): False,
        ("wrong", "FedAvg"): True, ("wrong", "FedProx"): True, ("wrong", "fast"): True,
    }  # fmt: skip
    conclusions = {contestant.labels: contestant.conclusion for contestant in results.contestants}
    assert conclusions["clean", "fast"] == "did not learn"
    assert conclusions["clean", "FedProx"] == "better, but the control did not learn"
    assert make_controls_table(results)[1][1] == [
        "raw features: linear", "70.00 ± 0.00 (standard error 5.00)", "70.00 ± 0.00 (standard error 5.00)",
    ]  # fmt: skip
    for trial in finished_study.trials:  # rankings have no standard error
        assert trial.result_file is not None
        values = json.loads(trial.result_file.read_text())
        values["controls"][0]["standard_error"] = None
        trial.result_file.write_text(json.dumps(values))
    results = read_results(finished_study)
    assert all(contestant.learned for contestant in results.contestants)
    # Cells with equal scores share a column.
    headings, (_, raw) = make_controls_table(results)
    assert headings == ["control without training", "accuracy (%)"]
    assert raw == ["raw features: linear", "70.00 ± 0.00 (standard error 5.00)"]


@pytest.mark.slow
def test_results_of_a_different_configuration_end_with_exit_code_2(
    finished_study: Study, grid: StudyFile, raydfl: Raydfl
) -> None:
    read_results(finished_study)
    changed = grid(**PROTOCOL | {"results": "results", "settings": {**PROTOCOL["settings"], "train.batch_size": 3}})
    for option in ("--table", "--check"):
        result = raydfl("study", changed, option)
        assert result.code == 2
        assert "is the result of a configuration outside the study (30 files)" in result.err


@pytest.mark.slow
def test_a_result_with_a_changed_digest_is_refused(finished_study: Study) -> None:
    read_results(finished_study)
    path = finished_study.trials[0].result_file
    assert path is not None
    path.write_text(path.read_text().replace(finished_study.trials[0].result[1], "0" * 16))
    for check in (check_results, read_results):
        with pytest.raises(ConfigError, match="result of a different configuration"):
            check(finished_study)


def test_a_damaged_result_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"run\.json is damaged"):
        load_result(path)


# -- tuning ----------------------------------------------------------------------------------------------------------


def write_tuning(grid: StudyFile, **changes: Any) -> Path:
    search = {
        "control": None,
        "repeat": None,
        "settings": {"train.rounds": ROUNDS, "data.split.validation": 0.25, "run.seed": 9},
        "axes": {"method": {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": {"name": "fedprox", "mu": 0.5}}}},
        "domains": {"train.optimiser.lr": {"grid": [0.01 * at for at in range(1, 9)]}},
        "searcher": "grid",
    }
    return grid(name="tuning", **search | changes)


@pytest.fixture(name="tuned_keys")
def make_tuned_keys(grid: StudyFile) -> dict[str, Any]:
    """Return the keys of a study with a finished search. The best rates are 0.03 (FedAvg) and 0.05 (FedProx)."""
    search = load_study(write_tuning(grid))
    for trial in search.trials:
        distance = abs(trial.values["train.optimiser.lr"] - {"FedAvg": 0.03, "FedProx": 0.05}[trial.labels[0]])
        write_run_folder(trial, {"validation model/accuracy": [0.9 - distance] * ROUNDS})
    axes = {"method": {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": {"name": "fedprox", "mu": 0.5}}}}
    return PROTOCOL | {"axes": axes, "tuned": "tuning.yaml"}


def test_each_contestant_has_its_best_settings_and_controls_those_of_the_control(
    grid: StudyFile, tuned_keys: dict[str, Any]
) -> None:
    study = load_study(grid(**tuned_keys | {"controls": ["local", "centralised"]}))
    assert not any(tuned.extreme for tuned in study.tuned.values())
    rates = {trial.labels[0]: trial.config.train.optimiser.lr for trial in study.trials}
    assert rates == pytest.approx({"FedAvg": 0.03, "FedProx": 0.05, "local only": 0.03, "centralised": 0.03})
    scores = {"FedAvg": 0.5, "FedProx": 0.6, "local only": 0.4, "centralised": 0.8}
    finish(study, scores)
    conclusions = {contestant.labels[0]: contestant.conclusion for contestant in read_results(study).contestants}
    assert conclusions == {
        "FedAvg": "",
        "FedProx": "better",
        "local only": "worse (not tuned)",
        "centralised": "better (not tuned)",
    }
    assert "Not tuned, with the settings of the control: local only, centralised." in " ".join(
        describe_results(read_results(study))
    )


def test_tuned_settings_do_not_replace_those_of_a_control(grid: StudyFile, tuned_keys: dict[str, Any]) -> None:
    changed = {"train.optimiser": {"lr": 0.07}}
    file = grid(**tuned_keys | {"controls": {"untrained": {}, "local": {}, "centralised": changed}})
    rates = {trial.labels[0]: trial.config.train.optimiser.lr for trial in load_study(file).trials}
    # An untrained network takes no step: its rate is the smallest normal float32.
    assert rates["untrained"] == 1.2e-38
    # A search without axes tunes all contestants together. Its trials are those of FedAvg, with the best rate 0.03.
    write_tuning(grid, axes=None)
    together = {trial.labels[0]: trial.config.train.optimiser.lr for trial in load_study(file).trials}
    assert (together["untrained"], together["FedProx"]) == (1.2e-38, pytest.approx(0.03))
    assert (rates["local only"], rates["centralised"]) == pytest.approx((0.03, 0.07))


@pytest.mark.slow
def test_a_best_setting_at_the_end_of_the_tried_range_is_reported(grid: StudyFile, tuned_keys: dict[str, Any]) -> None:
    search = load_study(
        write_tuning(grid, domains={"train.optimiser.lr": {"grid": [0.01 * at for at in range(3, 11)]}})
    )
    for trial in search.trials:
        if not trial.run_dir.exists():
            write_run_folder(trial, {"validation model/accuracy": [0.5] * ROUNDS})
    study = load_study(grid(**tuned_keys))
    assert {labels: tuned.extreme for labels, tuned in study.tuned.items()} == {
        ("FedAvg",): ["train.optimiser.lr"],
        ("FedProx",): [],
    }
    notes = " ".join(describe_results(read_results(study)))
    assert "Tuned settings of FedAvg: train.optimiser.lr=0.03." in notes
    assert "Best at an end of the tried range, so a wider range may be better: FedAvg." in notes


def test_a_contestant_at_chance_in_the_search_is_reported(grid: StudyFile) -> None:
    # FedProx scores 60: below 50 + 2 x 10.
    chance = to_json([Control("chance", "validation", "accuracy", 0.5, 25, 0.1)], "")
    search = load_study(write_tuning(grid))
    for trial in search.trials:
        score = {"FedAvg": 0.9, "FedProx": 0.6}[trial.labels[0]]
        write_run_folder(trial, {"validation model/accuracy": [score] * ROUNDS})
        (trial.run_dir / "controls.json").write_text(chance)
    study = load_study(grid(**PROTOCOL | {"axes": dict(search.settings.axes), "tuned": "tuning.yaml"}))
    assert {labels: tuned.learned for labels, tuned in study.tuned.items()} == {("FedAvg",): True, ("FedProx",): False}
    assert (
        "Did not learn in the search, so their settings are chosen at random: FedProx. Train longer there."
        in " ".join(describe_results(read_results(study)))
    )


def test_a_contestant_may_be_tuned_over_its_own_option(grid: StudyFile, tuned_keys: dict[str, Any]) -> None:
    # Eight trials for each: eight rates for FedAvg, four rates and two values of mu for FedProx.
    own = {"train.optimiser.lr": {"grid": [0.02, 0.04, 0.05, 0.06]}, "method.mu": {"grid": [0.25, 1]}}
    axes = {
        "FedAvg": {"method": "fedavg"},
        "FedProx": {"method": {"name": "fedprox", "mu": 0.5}, "domains": own},
    }
    search = load_study(write_tuning(grid, axes={"method": axes}))
    prox = [trial for trial in search.trials if trial.labels == ("FedProx",)]
    assert {(trial.config.train.optimiser.lr, trial.config.method["mu"]) for trial in prox} == {
        (rate, mu) for rate in (0.02, 0.04, 0.05, 0.06) for mu in (0.25, 1)
    }
    for trial in search.trials:
        if not trial.run_dir.exists():
            distance = abs(trial.values["train.optimiser.lr"] - 0.05) + trial.values.get("method.mu", 0) / 10
            write_run_folder(trial, {"validation model/accuracy": [0.9 - distance] * ROUNDS})
    study = load_study(grid(**tuned_keys))
    assert {labels: tuned.values for labels, tuned in study.tuned.items()} == {
        ("FedAvg",): {"train.optimiser.lr": pytest.approx(0.03)},
        ("FedProx",): {"train.optimiser.lr": 0.05, "method.mu": 0.25},
    }
    assert {labels: tuned.extreme for labels, tuned in study.tuned.items()} == {
        ("FedAvg",): [],
        ("FedProx",): ["method.mu"],
    }
    assert {trial.config.method["mu"] for trial in study.trials if trial.labels == ("FedProx",)} == {0.25}
    results = read_results(search)
    headings, lines = make_full_table(results)
    option = headings.index("method.mu")
    assert {line[option] for line in lines if line[0] == "FedAvg"} == {"-"}
    assert {line[option] for line in lines if line[0] == "FedProx"} == {"0.25", "1"}


@pytest.mark.parametrize(
    ("domains", "changes", "message"),
    [
        ({"method.mu": {"grid": [0.1, 1]}}, {}, r"unequal numbers of trials \(FedAvg: 8; FedProx: 16\)"),
        ({"method.mu": {"uniform": [0.1, 1.0]}}, {}, "FedProx: domains.method.mu: searcher grid needs a list"),
        ({"method.mu": 1}, {}, r"axes\.method\.FedProx\.domains\.method\.mu"),
        ([0.1], {}, "but must be a group of domains by setting"),
        ({"method.mu": {"grid": [1]}}, {"searcher": "random"}, "needs searcher: grid"),
        ({"method.mu": {"grid": [1]}}, {"domains": {}, "searcher": None}, "Add domains to the study"),
        ({"method.nu": {"grid": [1]}}, {}, "FedProx: .*'nu'"),
        (
            {"train.optimiser.lr": {"grid": [0.01, 0.02]}, "ray.actors": {"grid": [0, 1, 2, 3]}},
            {},
            "trial-000 .* and trial-001 .* have equal results. Remove the setting",
        ),
        ({"method": {"grid": ["fedprox"]}}, {}, "domains: method is the name of an axis, too"),
    ],
)
def test_wrong_domains_of_a_label_are_named(
    grid: StudyFile, domains: Any, changes: dict[str, Any], message: str
) -> None:
    labels = {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": "fedprox", "domains": domains}}
    with pytest.raises(ConfigError, match=message):
        load_study(write_tuning(grid, axes={"method": labels}, **changes))


def test_unequal_tuning_is_refused(grid: StudyFile, tuned_keys: dict[str, Any]) -> None:
    search = load_study(write_tuning(grid))
    shutil.rmtree(search.trials[0].run_dir)
    with pytest.raises(ConfigError, match=r"unequal or missing trials \(FedAvg 7, FedProx 8\)"):
        load_study(grid(**tuned_keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": {"score": "accuracy", "split": "test"}}, "tunes on the test data"),
        ({"metric": {"score": "accuracy", "split": "client_test"}}, "tunes on the test data"),
        (
            {"settings": {"train.rounds": ROUNDS, "data.split.validation": 0.25, "run.seed": 3}},
            "tunes with a value of run.seed",
        ),
        ({"repeat": {"run.seed": [9, 3]}}, "tunes with a value of run.seed"),
        ({"domains": None, "searcher": None}, "has no domains"),
    ],
)
def test_tuning_on_reported_data_is_refused(
    grid: StudyFile, tuned_keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    write_tuning(grid, **changes)
    with pytest.raises(ConfigError, match=message):
        load_study(grid(**tuned_keys))


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"domains": {"train.optimiser.lr": {"grid": [0.01, 0.02]}}}, "List more values in its domains."),
        (
            {"domains": {"train.optimiser.lr": {"uniform": [0.01, 0.02]}}, "searcher": "random", "samples": 2},
            "Raise samples there.",
        ),
    ],
)
def test_fewer_than_eight_tuning_trials_are_refused_before_they_are_trained(
    grid: StudyFile, changes: dict[str, Any], advice: str
) -> None:
    write_tuning(grid, **changes)
    axes = {"method": {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": {"name": "fedprox", "mu": 0.5}}}}
    with pytest.raises(ConfigError, match="has 2 trials per contestant, but the protocol requires 8") as caught:
        load_study(grid(**PROTOCOL, axes=axes, tuned="tuning.yaml"))
    assert str(caught.value).endswith(advice)


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curves_over_bytes_only_for_unequal_traffic(finished_study: Study) -> None:
    read_results(finished_study)
    for trial in finished_study.trials:
        assert trial.result_file is not None
        values = json.loads(trial.result_file.read_text())
        values["budget"] = {"MB up": 24.0 if trial.labels == ("clean", "FedProx") else 12.0}
        trial.result_file.write_text(json.dumps(values))
    curves, by_bytes = draw_curves(read_results(finished_study)), draw_by_bytes(read_results(finished_study))
    assert curves
    assert by_bytes
    assert [axes.get_title(loc="left") for axes in curves.figure().axes] == ["clean", "wrong"]
    assert [axes.get_title(loc="left") for axes in by_bytes.figure().axes] == ["clean"]
    ends = {line.get_label(): float(line.get_xdata()[-1]) for line in by_bytes.figure().axes[0].lines}
    assert ends == {"FedAvg": 12.0, "FedProx": 24.0, "fast": 12.0}  # the sums over all rounds


@pytest.mark.slow
def test_agreement_with_true_groups_is_a_further_metric_over_the_rounds(grid: StudyFile) -> None:
    """Oracle: the recorded index of each round, in per cent; a contestant without groups has no curve."""
    index = {"score": "tasks/rand_index", "split": "server", "label": "adjusted Rand index"}
    study = load_study(grid(**PROTOCOL | {"results": "results", "also": [index]}))
    for trial in study.trials:
        scores = {
            name: [0.5] * trial.config.train.rounds for name in ("test model/accuracy", "validation model/accuracy")
        }
        if trial.labels[1] == "FedProx":
            scores["server tasks/rand_index"] = [(at + 1) / 10 for at in range(trial.config.train.rounds)]
        write_run_folder(trial, scores)
    results = read_results(study)
    plot = draw_curves(results, 1)
    assert plot
    assert plot.title == "adjusted Rand index"
    figure = plot.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["clean", "wrong"]
    (line,) = figure.axes[0].lines
    assert line.get_ydata() == pytest.approx([10.0 * (at + 1) for at in range(study.rounds)])
    headings, lines = make_full_table(results)
    column = headings.index("adjusted Rand index")
    assert {line[1]: line[column] != "-" for line in lines} == {"FedAvg": False, "FedProx": True, "fast": False}


def test_a_result_has_the_budget_of_its_run(grid: StudyFile) -> None:
    study = load_study(grid())
    record = read_run(run(study.trials[0].config).run_dir)
    sums = {name: record.sum_totals(name) or 0.0 for name in ("multiply_adds", "seconds/processor")}
    budget = make_result(study, study.trials[0]).budget
    assert budget["multiply-adds (billions)"] == round(sums["multiply_adds"] / 1e9, 3)
    assert budget["processor seconds"] == round(sums["seconds/processor"], 3)
    assert all(sums.values())


def test_a_budget_with_an_unknown_round_is_omitted(grid: StudyFile) -> None:
    first, second, *_ = (study := load_study(grid())).trials
    work = {"train steps": [2.0, 2.0, 2.0], "train multiply_adds": [1e9, 1e9, 1e9]}  # totals of 10 clients
    write_run_folder(first, work)
    write_run_folder(second, {**work, "train multiply_adds": [1e9, 1e9]})
    assert make_result(study, first).budget == {"client steps": 60.0, "multiply-adds (billions)": 30.0}
    assert make_result(study, second).budget == {"client steps": 60.0}


@pytest.mark.slow
def test_a_result_without_a_column_of_the_budget_has_a_dash(finished_study: Study) -> None:
    read_results(finished_study)
    path = next(trial.result_file for trial in finished_study.trials if trial.labels == ("clean", "FedAvg"))
    assert path is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), "budget": {"multiply-adds (billions)": 12.5}}))
    headings, lines = make_full_table(read_results(finished_study))
    column = headings.index("multiply-adds (billions)")
    assert {line[column] for line in lines if line[:2] == ["clean", "FedAvg"]} == {"12.5"}
    assert {line[column] for line in lines if line[:2] != ["clean", "FedAvg"]} == {"-"}


@pytest.mark.slow
def test_a_score_of_several_data_sets_is_the_mean_over_them(grid: StudyFile) -> None:
    parts = {"low": {"speakers": 4}, "high": {"classes": 5, "first": 10, "speakers": 3}}
    study = load_study(grid(settings={"train.rounds": 2, "data.parts": parts}))
    trial = study.trials[0]
    write_run_folder(trial, {"test low:model/accuracy": [0.2, 0.5], "test high:model/accuracy": [0.4, 0.9]})
    controls = [
        Control("chance", "test", "low/accuracy", 0.2, 100, 0.03),
        Control("chance", "test", "high/accuracy", 0.4, 300, 0.04),
        Control("majority", "test", "low/accuracy", 0.5, 100),
        Control("majority", "test", "high/accuracy", 0.5, 300),
    ]
    (trial.run_dir / "controls.json").write_text(to_json(controls, ""))
    result = make_result(study, trial)
    assert result.scores == {"test model/accuracy": [(1, pytest.approx(0.3)), (2, pytest.approx(0.7))]}
    assert result.controls == [
        asdict(Control("chance", "test", "accuracy", pytest.approx(0.3), 400, pytest.approx(0.025))),  # type: ignore[arg-type]
        asdict(Control("majority", "test", "accuracy", 0.5, 400)),
    ]
    order = TrialOrder(trial.config, keys=tuple(tuple(map(" ".join, names)) for names in trial.keys))
    assert order.find_score({"test low:model/accuracy": 0.5, "test high:model/accuracy": 0.9}) == pytest.approx(0.7)
    with pytest.raises(InputError, match="is not measured"):
        order.find_score({"test low:model/accuracy": 0.5})


@pytest.mark.slow
def test_a_result_has_the_controls_of_the_headlines_test_set(grid: StudyFile) -> None:
    study = load_study(grid())
    trial = study.trials[0]
    done = run(trial.config)
    assert done.run_dir.samefile(trial.run_dir)
    validated = load_study(grid(metric={"split": "validation"}))
    for metric in (trial.metric, validated.trials[0].metric):
        controls = make_result(study, replace(trial, metric=metric)).controls
        assert controls == [asdict(control) for control in done.controls if control.split == metric.split]
        assert [control["name"] for control in controls][:2] == ["chance", "majority"]
