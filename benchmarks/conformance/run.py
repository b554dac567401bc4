"""Hold each adapter to the properties, in an environment of its own, and write CONFORMANCE.md:
`python benchmarks/conformance/run.py`, or with the names of some. Those that are not named keep
their lines."""

import ast
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "out" / "conformance"
FOUND = HERE / "found.json"
PAGE = HERE.parent / "CONFORMANCE.md"
MARKS = {"holds": "yes", "fails": "**no**", "not offered": ""}
INTRO = """\
# Conformance

What replays promise, and what they keep. Each property is a function of
[properties.py](conformance/properties.py), and each library is used as its own docs say, by an
adapter in [adapters](conformance/adapters). Blank: not offered, which is no fault. "no": what
breaks it is below. Where a property is arguable, the adapter or the note says so.

`make conformance` makes this table; `pytest benchmarks/conformance --replay=my_adapter.py` holds
your own replay to it.
"""


def constants(path):
    """Return the constants of an adapter's file, without importing it."""
    return {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def python_of(path):
    """Return the Python of an adapter's environment, which is made if it is missing."""
    given = constants(path)
    if "REQUIREMENTS" not in given:  # it is of this project
        return sys.executable
    environment = OUT / path.stem
    python = environment / "bin" / "python"
    done = environment / "installed"
    if not done.exists() or done.read_text() != given["REQUIREMENTS"]:
        version = ["--python", given["PYTHON"]]
        uv = pathlib.Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "-q", "--clear", *version, environment], check=True)
        packages = [*given["REQUIREMENTS"].split(), "pytest>=9", "ml_dtypes"]
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *packages], check=True)
        done.write_text(given["REQUIREMENTS"])
    return python


def main():
    files = {path.stem: path for path in sorted((HERE / "adapters").glob("[!_]*.py"))}
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for name in sys.argv[1:] or files:
        report = OUT / f"{name}.json"
        OUT.mkdir(parents=True, exist_ok=True)
        command = [python_of(files[name]), "-m", "pytest", "-q", HERE, f"--replay={files[name]}"]
        subprocess.run([*command, f"--report={report}", "--tb=no"], check=False, cwd=ROOT)
        found[name] = json.loads(report.read_text())
    FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(found))


def page(found):
    replays = {name: of for name in sorted(found) for name, of in found[name].items()}
    names = [*dict.fromkeys(name for of in replays.values() for name in of)]
    head = "| property | " + " | ".join(replays) + " |"
    lines = [
        f"| {name.replace('_', ' ')} | "
        + " | ".join(MARKS[of.get(name, ["not offered"])[0]] for of in replays.values())
        + " |"
        for name in names
    ]
    faults = [
        f"- **{replay}, {name.replace('_', ' ')}**: {of[name][1].splitlines()[0][:400]}"
        for replay, of in replays.items()
        for name in names
        if of.get(name, [""])[0] == "fails"
    ]
    table = "\n".join([head, "| --- |" + " :---: |" * len(replays), *lines])
    return f"{INTRO}\n{table}\n\n## What fails\n\n" + "\n".join(faults) + "\n"


if __name__ == "__main__":
    main()
