"""The layering: which module may import which, and who may pay for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import make_profile

from eth_cli.profile.table import write_profile

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "eth_cli"

LAYERS: tuple[tuple[str, ...], ...] = (
    # A name stands for a module, or for a package with everything in it. Lower never imports
    # higher; within a layer, imports are free (but never circular, see the test of that).
    ("errors", "units", "env", "processes", "__init__"),
    ("faults", "stdout"),
    ("serde", "catalogue", "schedule", "buckets"),
    ("events", "cluster", "cluster_file", "model", "plan"),
    (
        "hf_fields",
        "hf_gpt",
        "hf_llama",
        "model_sources",
        "hf_config",
        "profile.table",
        "torchrun",
        "worker_entry",
        "processes",
    ),
    ("models", "profile.analytic", "profile.roofline", "profile.activations", "trace"),
    ("search", "profile", "launch"),
    ("report", "comparison", "render"),
    ("commands", "cli"),
    ("__main__",),
)

STRANGERS = (("search", "launch"), ("search", "profile"), ("launch", "profile"))
"""Pairs of packages that never import each other; `profile.table`, a format, is not meant."""

MAY_IMPORT_TORCH = (
    "models",
    "profile.activations",
    "profile.compute",
    "profile.network",
    "profile.worker",
    "launch.runtime",
)
"""Who may import torch when imported; everybody else at most inside a function."""

PURE = "search"
PURE_EXCEPT = {("search.solver", "os")}
"""Silencing what a solver's C code prints needs the file descriptor of stdout."""
FORBIDDEN_IN_PURE = ("torch", "rich", "typer", "time", "random", "os", "pathlib", "subprocess")


def module_names() -> list[str]:
    """Every module of the package, without the package's own name: ``search.cost``."""
    names = []
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE / PACKAGE).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts))
    return names


def path_of(module: str) -> Path:
    """The file of a module."""
    base = SOURCE.joinpath(PACKAGE, *module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def imports_of(module: str, *, only_module_level: bool = False) -> Iterator[tuple[str, int]]:
    """(full name, line) of everything that a module imports; of ``from a import b``, ``a.b``."""
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    nodes = _module_level(tree) if only_module_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _module_level(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _module_level(node)


def own_modules_imported(module: str) -> Iterator[tuple[str, int]]:
    """(module of this package, line) for each import of one."""
    known = set(module_names())
    for name, line in imports_of(module):
        if name.split(".")[0] != PACKAGE:
            continue
        parts = name.split(".")[1:]
        while parts and ".".join(parts) not in known:
            parts.pop()  # the last parts are names inside the module
        yield ".".join(parts) or "__init__", line


def is_in(module: str, place: str) -> bool:
    """Whether a module is a place of the layering or lies in it."""
    return module == place or module.startswith(place + ".")


def layer_of(module: str) -> int | None:
    """Index of a module's layer: the longest name that covers it decides."""
    matches = [
        (len(place), index)
        for index, layer in enumerate(LAYERS)
        for place in layer
        if is_in(module, place)
    ]
    return max(matches)[1] if matches else None


def test_every_module_has_a_layer() -> None:
    homeless = [m for m in module_names() if layer_of(m) is None]
    assert not homeless, f"give these a layer in {Path(__file__).name}: {homeless}"


def test_lower_layers_never_import_higher_ones() -> None:
    faults = [
        f"{module}:{line} imports {target}"
        for module in module_names()
        for target, line in own_modules_imported(module)
        if (own := layer_of(module)) is not None
        and (other := layer_of(target)) is not None
        and other > own
    ]
    assert not faults


@pytest.mark.parametrize(("one", "other"), STRANGERS)
def test_packages_that_never_import_each_other(one: str, other: str) -> None:
    level = LAYERS.index(("search", "profile", "launch"))
    faults = [
        f"{module}:{line} imports {target}"
        for module in module_names()
        for target, line in own_modules_imported(module)
        if layer_of(target) == level
        if (is_in(module, one) and is_in(target, other))
        or (is_in(module, other) and is_in(target, one) and layer_of(module) == level)
    ]
    assert not faults


def test_no_import_cycle() -> None:
    graph = {m: {t for t, _ in own_modules_imported(m) if t != m} for m in module_names()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_torch_is_imported_where_it_may_be() -> None:
    faults = [
        f"{module}:{line}"
        for module in module_names()
        if not any(is_in(module, place) for place in MAY_IMPORT_TORCH)
        for name, line in imports_of(module, only_module_level=True)
        if name.split(".")[0] == "torch"
    ]
    assert not faults


def test_search_is_pure() -> None:
    faults = [
        f"{module}:{line} imports {name}"
        for module in module_names()
        if is_in(module, PURE)
        for name, line in imports_of(module)
        if name.split(".")[0] in FORBIDDEN_IN_PURE
        if (module, name) not in PURE_EXCEPT
    ]
    assert not faults


def test_the_guards_see_what_they_guard_against() -> None:
    assert layer_of("search.cost") == layer_of("launch.run") == layer_of("profile.compute")
    assert layer_of("profile.table") < layer_of("models.build") < layer_of("search.cost")  # type: ignore[operator] # all are placed
    assert any(t == "serde" for t, _ in own_modules_imported("plan"))
    tree = ast.parse("import a\ndef f():\n    import b\nif TYPE_CHECKING:\n    import c\n")
    names = [n.names[0].name for n in _module_level(tree) if isinstance(n, ast.Import)]
    assert names == ["a"]


def imported_by(code: str) -> set[str]:
    """Top-level packages that are loaded after a fresh interpreter has run some code."""
    code += "\nimport sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def run_cli(*argv: str) -> str:
    """Code that runs the command line and survives its exit."""
    return (
        "from eth_cli.cli import main\n"
        f"try: main({list(argv)!r})\n"
        "except SystemExit as end: assert not end.code, end.code"
    )


def test_help_never_imports_torch() -> None:
    for argv in (["--help"], ["--version"], ["run", "--help"]):
        assert not imported_by(run_cli(*argv)) & {"torch", "pulp", "highspy", "numpy"}


def test_the_command_line_itself_waits_for_no_data_types() -> None:
    assert not imported_by(run_cli("--help")) & {"pydantic", "yaml"}


def test_planning_with_a_profile_imports_no_torch_and_one_solver_and_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    write_profile(tmp_path / "profile.json", make_profile(types=("fast", "slow")))
    spec = SOURCE.parent / "cluster_specs" / "laptop.yaml"
    text = spec.read_text(encoding="utf-8").replace("6MiB", "1GB")
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    files = ("--cluster", f"{tmp_path}/cluster.yaml", "--profile", f"{tmp_path}/profile.json")
    plan = f"{tmp_path}/plan.json"
    commands = (
        ("plan", *files, "--global-batch-size", "4", "-o", plan),
        ("simulate", plan, *files),
    )
    for argv in commands:
        loaded = imported_by(run_cli(*argv) + _ONE_THREAD)
        assert not loaded & {"torch", "pulp"}
        assert "highspy" in loaded or argv[0] != "plan"


_ONE_THREAD = """
import os
if os.path.isdir("/proc/self/task"):
    assert len(os.listdir("/proc/self/task")) == 1, "threads were started"
"""
"""What follows a command that starts no threads: neither NumPy's nor the solver's."""
