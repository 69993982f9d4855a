"""Write a software bill of materials (CycloneDX 1.6, JSON) of raydfl and the packages in constraints.txt.

    python tools/sbom.py build/release/raydfl.cdx.json

Licences and dependencies come from the metadata of the installed packages. Equal packages give an equal file.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

ROOT = Path(__file__).parents[1]


def normalise(name: str) -> str:
    """Return a package's name in the form of the package index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_constraints(path: Path) -> dict[str, str]:
    """Read the version of each package in a file of constraints, by normalised name."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normalise(name.strip()): version.split()[0] for name, version in pairs}


def find_installed(name: str) -> Distribution | None:
    """Return an installed package, or ``None`` for a package of another platform."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def list_dependencies(package: Distribution, known: set[str]) -> list[str]:
    """List the known packages that a package requires without extras."""
    names = set()
    for text in package.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names.add(normalise(requirement.name))
    return sorted(names & known)


def make_component(name: str, version: str, package: Distribution | None) -> dict[str, Any]:
    """Return the component of a package."""
    reference = f"pkg:pypi/{name}@{version}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
    }
    licence = package.metadata.get("License-Expression") if package is not None else None
    if licence:
        component["licenses"] = [{"expression": licence}]
    return component


def make_bill(versions: dict[str, str]) -> dict[str, Any]:
    """Return the bill of materials.

    Args:
        versions: Version of each package, by normalised name.

    Raises:
        ValueError: The installed version of a package differs.
    """
    installed = {name: find_installed(name) for name in versions}
    for name, package in installed.items():
        if package is not None and package.version != versions[name]:
            raise ValueError(f"{name} {package.version} is installed, but constraints.txt has {versions[name]}.")
    raydfl = distribution("raydfl")
    components = [make_component(name, version, installed[name]) for name, version in sorted(versions.items())]
    references = {component["name"]: component["bom-ref"] for component in components}
    main = {**make_component("raydfl", raydfl.version, raydfl), "type": "application"}
    packages = {main["bom-ref"]: raydfl} | {
        references[name]: package for name, package in sorted(installed.items()) if package is not None
    }
    bill: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": main},
        "components": components,
        "dependencies": [
            {
                "ref": reference,
                "dependsOn": [references[name] for name in list_dependencies(package, set(references))],
            }
            for reference, package in packages.items()
        ],
    }
    content = json.dumps(bill, sort_keys=True)
    return {**bill, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"}


def main(path: Path) -> None:
    """Write the bill of materials to a file."""
    try:
        bill = make_bill(read_constraints(ROOT / "constraints.txt"))
    except ValueError as error:
        sys.exit(f"error: {error} Install the packages with make, then try again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(bill, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
