"""The documentation: `make docs`."""

import re

import cunorm

project = "cunorm"
copyright = "the cunorm developers"  # noqa: A001 - Sphinx' name
version = release = cunorm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
default_role = "py:obj"  # what is in single backticks becomes a link where it can
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the sections on parameters have them
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"cunorm {release}"
html_static_path: list[str] = []
html_theme_options = {
    "light_css_variables": {"font-stack--monospace": "ui-monospace, Menlo, Consolas, monospace"},
}


def formulas(app, what, name, obj, options, lines):
    """Keep formulas as they are: indented paragraphs before the sections of a docstring."""
    found, before = [], ""
    in_sections = False
    for number, line in enumerate(lines):
        after = lines[number + 1] if number + 1 < len(lines) else ""
        in_sections = in_sections or (line != "" and set(after.strip()) == {"-"})
        if not in_sections and line.startswith("    ") and before == "":
            found += ["::", ""]
        found.append(line)
        before = line
    lines[:] = found


def attributes(app, what, name, obj, options, lines):
    """Attributes that are described together get an entry each, as napoleon wants it."""
    text = "\n".join(lines)
    start = text.find("Attributes\n----------\n")
    if start >= 0:
        before, section = text[:start], text[start:]
        section, *rest = re.split(r"(?=\n\n\w+\n-+\n)", section, maxsplit=1)
        together = re.compile(r"^(\w+(?:, \w+)+) : (.*(?:\n    .*)*)", re.MULTILINE)
        section = together.sub(
            lambda entry: "\n".join(f"{one} : {entry[2]}" for one in entry[1].split(", ")), section
        )
        lines[:] = (before + section + "".join(rest)).split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", formulas, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", attributes, priority=101)
