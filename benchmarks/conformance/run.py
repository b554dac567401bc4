"""Hold each adapter to the properties, in an environment of its own, and write CONFORMANCE.md:
`python benchmarks/conformance/run.py`, or with the names of some. Those that are not named keep
their lines."""

import ast
import datetime
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "out" / "conformance"
FOUND = HERE / "found.json"
PAGE = HERE.parent / "CONFORMANCE.md"
MARKS = {"holds": "yes", "fails": "**no**", "arguable": "(no)", "not offered": ""}
COLUMNS = 8  # of a table
MOST_TEXT = 400  # characters of what fails
INTRO = """\
# Conformance

What replays promise, and what they keep. Each property is a function of
[properties.py](conformance/properties.py), whose docstring says why it matters and where its fault
was reported. Each library is used as its own docs say, by an adapter in
[adapters](conformance/adapters). Blank: not offered, which is no fault. "no": what breaks it is
below, with the steps around it; it failed twice. "(no)": the library may mean it so. Streams and
samplers have the seed 0, where nothing else is said.

`make conformance` makes this page; `pytest benchmarks/conformance --replay=my_adapter.py` holds
your own replay to the properties.
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
        for line in ("pytest>=9 ml_dtypes", *given["REQUIREMENTS"].splitlines()):
            command = [uv, "pip", "install", "-q", "--python", python, *line.split()]
            subprocess.run(command, check=True)
        done.write_text(given["REQUIREMENTS"])
    return python


def main():
    files = {path.stem: path for path in sorted((HERE / "adapters").glob("[!_]*.py"))}
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for name in sys.argv[1:] or files:
        report = OUT / f"{name}.json"
        OUT.mkdir(parents=True, exist_ok=True)
        python = python_of(files[name])
        command = [python, "-m", "pytest", "-q", HERE, f"--replay={files[name]}"]
        subprocess.run([*command, f"--report={report}", "--tb=no"], check=False, cwd=ROOT)
        found[name] = {"date": str(datetime.date.today()), "found": json.loads(report.read_text())}
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))


def page(found):
    """Return the text of the page: tables, what fails, and when each library was held to it."""
    ours_first = sorted(found, key=lambda name: (not name.startswith(("ours", "one_file")), name))
    replays = {label: of for name in ours_first for label, of in found[name]["found"].items()}
    names = [*dict.fromkeys(name for of in replays.values() for name in of)]
    lines = [INTRO]
    for start in range(0, len(replays), COLUMNS):
        some = [*replays.items()][start : start + COLUMNS]
        lines += ["| property | " + " | ".join(label for label, _ in some) + " |"]
        lines += ["| --- |" + " :---: |" * len(some)]
        for name in names:
            marks = (MARKS[of[name][0]] for _, of in some)
            lines += [f"| {name.replace('_', ' ')} | " + " | ".join(marks) + " |"]
        lines += [""]
    lines += ["## What fails", ""]
    for label, of in replays.items():
        for name, (kind, said) in of.items():
            if kind in ("fails", "arguable"):
                text = " ".join(said.split())[:MOST_TEXT]
                lines += [f"- **{label}, {name.replace('_', ' ')}**: {text}"]
    dates = ", ".join(f"{name} {found[name]['date']}" for name in ours_first)
    return "\n".join([*lines, "", f"Dates: {dates}.", ""])


if __name__ == "__main__":
    main()
