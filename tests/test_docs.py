"""The documentation: its snippets run, it names all that is public, and it is built."""

import re

import pytest
from test_package import CHECKOUT, run_python

import cunorm

DOCS = CHECKOUT / "docs"
PAGES = ["index", *(f"guide/{path.stem}" for path in sorted((DOCS / "guide").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_snippets(page, tmp_path, monkeypatch):
    """One after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippets
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), namespace)
    if page == "guide/training":
        network, x, target = (namespace[name] for name in ("network", "x", "target"))
        for layer in network:
            x = layer.eval().forward(x) if hasattr(layer, "eval") else layer.forward(x)
        assert ((x - target) ** 2).mean() < 0.1 * (target**2).mean()


def test_every_guide_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert all(f"\n{page}\n" in index for page in PAGES[1:])


def test_reference_is_complete():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(set(cunorm.__all__) - {"__version__"})


def test_it_is_built(tmp_path):
    """Without a warning; formulas are kept as they are written."""
    pytest.importorskip("sphinx", reason="sphinx is not installed (the extra docs)")
    run_python(
        "-m", "sphinx", "--quiet", "--fail-on-warning", "--builder", "html", "--doctree-dir",
        str(tmp_path / "trees"), str(DOCS), str(tmp_path / "site"),
    )  # fmt: skip
    page = (tmp_path / "site" / "reference" / "functions.html").read_text(encoding="utf-8")
    plain = re.sub(r"<[^>]+>", "", page)
    assert "y = (x - mean) * inv_std * weight + bias,    inv_std = 1 / sqrt(var + eps)" in plain
