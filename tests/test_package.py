"""The package as it is installed: wheel and source distribution build, and the README's program
runs from the wheel."""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import jaxreplay

ROOT = pathlib.Path(jaxreplay.__file__).parents[1]
pytestmark = pytest.mark.thorough  # the oldest JAX imports the package in each run


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the source distribution, and the wheel from that."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    shutil.copytree(ROOT / "jaxreplay", source / "jaxreplay")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--outdir", folder, source)
    return folder


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_distributions_have_the_whole_package(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxreplay").rglob("*.py")}
    files |= {"jaxreplay/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert files == {name for name in names if name.startswith("jaxreplay/")}
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files | {"README.md", "LICENSE", "pyproject.toml"} <= names
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", metadata, re.MULTILINE)
    assert sorted(needs) == ["jax", "numpy"]


def test_the_readmes_program_trains_from_the_wheel(built, tmp_path):
    """It prints the mean episode length of each tenth of its run."""
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    text = (ROOT / "README.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert "import gymnax" in program
    program += f"\nassert jaxreplay.__file__.startswith({str(site)!r})\n"
    path = tmp_path / "program.py"
    path.write_text("import jaxreplay\n" + program)
    printed = run(
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {str(site)!r}); exec(open({str(path)!r}).read())",
        cwd=tmp_path,
    )
    lengths = re.findall(r"\d+\.", printed)
    assert len(lengths) == 10
    assert float(lengths[-1]) >= 100
