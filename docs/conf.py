"""Configuration of the docs: `make docs` builds them, with warnings as errors."""

import importlib
import inspect
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
# Code cells import the drawings of this folder, and the examples.
PATHS = [str(HERE), str(HERE.parent / "examples")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The pages share compiled programs: of all their small operations, too.
OUT = HERE.parent / "out"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(OUT / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Each kernel would warn that it listens on this machine.
os.environ["IPYTHONDIR"] = str(OUT / "ipython")
PROFILE = OUT / "ipython" / "profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
(PROFILE / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 'ERROR'\n")

import measured  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx import addnodes  # noqa: E402
from sphinx.errors import ExtensionError  # noqa: E402

import jaxreplay  # noqa: E402

project = "jaxreplay"
author = copyright = "The jaxreplay authors"
release = version = jaxreplay.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]

# What users call of these classes; all public members of the others.
SOME_MEMBERS = {
    "jaxreplay.actors.Actor": "running, params, add, flush, log",
    "jaxreplay.actors.Actors": "publish, metrics, stop, is_done",
    "jaxreplay.actors.Feed": "start, take",
    "jaxreplay.buffers.Plan": "batch",
    "jaxreplay.samplers.Layout": "capacity, split, row, envs, wrap, traits",
    "jaxreplay.samplers.Sampleable": (
        "count, select, contains, age, live, is_candidate, look_back, layout, episodes"
    ),
    "jaxreplay.samplers.WriteEffect": "written",
}

myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = measured.substitutions()
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["References"]
templates_path = ["_templates"]
autosummary_context = {"some_members": SOME_MEMBERS}
autosummary_imported_members = True
# Some systems take two names that differ by a capital for one file.
autosummary_filename_map = {
    f"jaxreplay.{name}": f"jaxreplay.{name}_class"
    for name in dir(jaxreplay)
    if name.lower() != name and name.lower() in dir(jaxreplay)
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True

html_theme = "sphinx_book_theme"
html_title = "jaxreplay"
html_static_path = ["_static"]
html_css_files = ["code.css"]
html_sidebars = {"**": ["navbar-logo.html", "sbt-sidebar-nav.html"]}  # the bar has the search
html_theme_options = {
    "repository_url": "https://github.com/jaxreplay/jaxreplay",
    "use_repository_button": True,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
}


def _as_literals(app, what, name, obj, options, lines):
    """Docstrings have names in single backticks, as Markdown; reStructuredText wants two."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", _literal, "\n".join(lines))
    text = re.sub(r"^( +\w+)_: ", r"\1\\_: ", text, flags=re.MULTILINE)  # else a reference
    lines[:] = text.split("\n")


def _literal(match):
    return f"``{match[1]}``" + (f"\\ {match[2]}" if match[2] else "")


def _check_api(app, error):
    """Raise an error for a public name that no page of the API describes."""
    described = app.env.domaindata["py"]["objects"]
    packages = ("", ".buffers", ".checkpoint", ".inspection", ".samplers", ".sb3", ".views")
    modules = (".autoreset", ".datasets", ".targets", ".torch", ".types")
    public = [
        f"jaxreplay{module}.{name}"
        for module in packages + modules
        for name, value in vars(importlib.import_module("jaxreplay" + module)).items()
        if _is_public(sys.modules["jaxreplay" + module], name, value, module in packages)
    ]
    pages = {name.rpartition(".")[2] for name in described}
    missing = [name for name in public if name.rpartition(".")[2] not in pages]
    if missing and not error:
        raise ExtensionError(f"not on a page of the API: {', '.join(missing)}")


def _is_public(module, name, value, is_package):
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    if hasattr(module, "__all__"):
        return name in (dir(module) if module is jaxreplay else module.__all__)
    if is_package:
        return inspect.isclass(value) and value.__module__.startswith("jaxreplay")
    return value.__module__ == module.__name__ and not name.startswith("_")


def _short_types(app, what, name, obj, options, signature, returned):
    """Return a signature with the names that users know."""
    return tuple(
        text
        and text.replace("jax.jaxlib._jax.Array", "jax.Array").replace(
            "jaxlib._jax.Array", "jax.Array"
        )
        for text in (signature, returned)
    )


def _list_names(app, page, source):
    """Write the names that `jaxreplay` has into the table of the API."""
    if page == "api/index":
        names = {*dir(jaxreplay)} - {"__version__", *jaxreplay._LAZY}
        names = sorted(names, key=str.lower)
        source[0] = source[0].replace("@NAMES", "\n   ".join(names))


def _link_names(app, doctree):
    """Let `jr.uniform` in a text lead to its entry in the API."""
    for literal in [*doctree.findall(nodes.literal)]:
        name = re.fullmatch(r"(?:jr|jaxreplay)\.([\w.]+)(?:\(.*\))?", literal.astext())
        if name and isinstance(literal.parent, nodes.paragraph | nodes.strong):
            target = {"reftype": "obj", "reftarget": f"jaxreplay.{name[1]}", "refexplicit": True}
            link = addnodes.pending_xref("", refdomain="py", refwarn=False, **target)
            literal.replace_self(link)
            link += literal


def setup(app):
    app.connect("source-read", _list_names)
    app.connect("doctree-read", _link_names)
    app.connect("autodoc-process-signature", _short_types)
    app.connect("autodoc-process-docstring", _as_literals, priority=1)
    app.connect("build-finished", _check_api)
