"""The software bill of materials: the required fields of CycloneDX, and a component for each line of constraints.txt."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import sbom


def test_the_bill_has_all_constraints_and_the_required_fields() -> None:
    versions = sbom.read_constraints(ROOT / "constraints.txt")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    bill = sbom.make_bill(versions)
    assert len(bill["components"]) == len(versions) == len(lines)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    references = [component["bom-ref"] for component in (bill["metadata"]["component"], *bill["components"])]
    assert len(references) == len(set(references))
    for component in bill["components"]:
        assert component["type"] == "library"
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= set(references)
    direct = bill["dependencies"][0]["dependsOn"]
    assert f"pkg:pypi/torch@{version('torch').partition('+')[0]}" in direct
    assert sbom.make_bill(versions) == bill


def test_another_installed_version_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"numpy .* is installed, but constraints.txt has 0.0.1"):
        sbom.make_bill({"numpy": "0.0.1"})
