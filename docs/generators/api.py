"""Generate the pages of the Python API from docstrings."""

from pathlib import Path

from generators import source
from generators.markup import prose, table

# all modules of a package, or the chosen ones
PACKAGES: dict[str, tuple[str, ...]] = {
    "balancing": (),
    "hf": ("attach", "trainer", "describe", "replay", "routers", "convert", "export"),
    "metrics": (),
    "model": ("transformer", "attention", "moe", "router", "head", "init"),
    "experts": ("backends", "select"),
    "report": (
        "statistics", "bootstrap", "sequential", "tokens_to_loss", "comparison", "table", "notes", "columns", "arms",
        "collect", "paper", "report",
    ),
}  # fmt: skip
MODULES = ("api", "cost")  # with a page of their own


def api_pages(root: Path) -> dict[str, str]:
    """Return `api/<name>.md` for each of `PACKAGES` and `MODULES`, and `api/index.md`."""
    pages = {f"api/{package}.md": _package(root, package) for package in PACKAGES}
    pages |= {f"api/{module}.md": f"# simbal.{module}\n\n::: simbal.{module}\n" for module in MODULES}
    about = {module: source.docstring(root / f"src/simbal/{module}.py") for module in MODULES}
    about |= {package: _about(root, package) for package in PACKAGES}
    rows = [(f"[simbal.{name}]({name}.md)", prose(text.split("\n\n")[0])) for name, text in about.items()]
    text = (
        "# Python API\n\nThe modules behind strategies, metrics and tables. The suffix of a tensor's name is its "
        "shape: `B` batch, `S` sequence, `N` tokens, `V` vocabulary, `D` model width, `H` heads, `P` head width, "
        "`L` MoE layers, `E` experts, `K` experts per token, `F` expert width, `R` routed rows.\n\n"
    )
    return {"api/index.md": text + table(("package", "content"), rows), **pages}


def _package(root: Path, package: str) -> str:
    folder = root / "src/simbal" / package
    names = PACKAGES[package] or sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    directives = [f"::: simbal.{package}.{name}\n" for name in names]
    return "\n".join([f"# simbal.{package}\n", prose(_about(root, package)) + "\n", *directives])


def _about(root: Path, package: str) -> str:
    return source.docstring(root / "src/simbal" / package / "__init__.py")
