"""Lower layers never import higher ones, and only exec/ and kernels/ (and what stands above) know numba."""

import ast
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "kvledger"
# low to high; names on one line may not import each other
ORDER = [
    {"errors"},
    {"units"},
    {"spec"},
    {"data"},
    {"plan"},
    {"cache"},
    {"text"},
    {"sched"},
    {"kernels"},
    {"weights"},
    {"models"},
    {"model"},
    {"exec"},
    {"clock"},
    {"engine"},
    {"metrics"},
    {"build", "frontend", "beam"},
    {"llm"},
    {"simulate"},
    {"bench", "evaluate"},
    {"server"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
NUMBA_ALLOWED = {"kernels", "exec"}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, only for type checking) of every import in the file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "kvledger" else [node.module]
            found += [(name, id(node) in typing_only) for name in names]
    return found


def part(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [p for p in sorted(SRC.rglob("*.py")) if p.parent != SRC or p.name != "__init__.py"]


def test_no_upward_edge():
    bad = []
    for path in files():
        for module, _ in imports(path):
            if module.startswith("kvledger."):
                target = module.split(".")[1]
                if target in RANK and RANK[target] > RANK[part(path)]:
                    bad.append(f"{path.relative_to(SRC)} -> {module}")
    assert not bad


def test_every_part_has_a_rank():
    assert {part(p) for p in files()} <= set(RANK)


def test_numba_only_where_allowed():
    bad = [
        str(p.relative_to(SRC))
        for p in files()
        for module, _ in imports(p)
        if module.split(".")[0] in {"numba", "llvmlite"} and part(p) not in NUMBA_ALLOWED
    ]
    assert not bad
