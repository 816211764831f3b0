"""List what of the package no verb, job or documented Python call reaches.

python tools/unreached.py            # exit 1 if there is anything

The roots are the verbs of the command line, the doors of a job (`pretrain_gpt`, `launch`, `hook`),
the programs that the package starts with `python -m`, each module and name that a page of `docs/`
or README imports in an example, and the tools that make the package's own tables.  A module is
reached if a chain of imports leads to it from a root; a function, class, method or constant, if
reached code has its name.  A method counts by its bare name, and as reached where Megatron or torch
is its class's base, or where Megatron's code has the name behind a dot.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_hetero"
DOORS = ("__main__", "api", "hook", "launch", "pretrain_gpt")
MAKERS = ("calibration_tables", "export_schemas", "layer_fits", "make_*", "serve_trace")
"""Tools that make data and pages of the package from its own code."""
_IN_PAGES = re.compile(rf"(?:from|import) ({PACKAGE}(?:\.\w+)*)")
_NAMED_IN_PAGES = re.compile(rf"from ({PACKAGE}[\w.]*) import ([\w, ]+)|({PACKAGE}(?:\.\w+)+)")
_STARTED = re.compile(rf'"({PACKAGE}(?:\.\w+)+)"')
GIVEN = f"{PACKAGE}.runtime.transformer_engine.kernels."
"""Modules whose public names are given to Transformer Engine, which calls them."""
FOR_TESTS = {
    "cost.memory.holdings.held_bytes": "what plans are compared by",
    "lab.verify.faults.newer.ONLY_RESUMED": "which faults need a job that resumes",
    "plan.file._AllOnLineOne": "of plan_from_data",
    "plan.file.plan_from_data": "plans that a test has edited",
    "runtime.backend.cpu_backend": "a test's own bridge",
    "runtime.backend.deactivate_cpu_backend": "leaves torch as it was",
    "runtime.faults.progress.PhaseStamps.pause": "a rest that is no hang",
    "runtime.gradients.sharding.parameter_gather.ParameterGather.num_under_way": "of the next",
    "runtime.gradients.sync.GradientSync.num_started": "overlap as it happens",
    "runtime.gradients.weights.HeldWeights.num_under_way": "overlap as it happens",
    "serving.compose.problem._shared_faults": "of faults",
    "serving.compose.problem._sum_of": "of faults",
    "serving.compose.problem.faults": "solutions are proved",
}
"""What tests look through at the package, and why it is there."""
_PLAIN_BASES = {"Protocol", "ABC", "Enum", "StrEnum", "NamedTuple", "Exception", "Generic"}
_BY_NAME = {"getattr", "hasattr", "setattr", "attrgetter"}

_Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Name = tuple[str, str]
"""A module, and a name at its top."""


def unreached() -> tuple[str, ...]:
    """Return the names of the modules that no root reaches, in order."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    roots = {name for name in _roots() if name in graph.modules}
    reached = set(roots)
    waiting = list(roots)
    while waiting:
        for module in graph.find_modules_directly_imported_by(waiting.pop()) - reached:
            reached.add(module)
            waiting.append(module)
    # A package's own file says what the folder holds; the folder is reached if a module in it is.
    packages = {module.rpartition(".")[0] for module in graph.modules}
    return tuple(sorted(graph.modules - reached - packages))


def _roots() -> Iterator[str]:
    yield from (f"{PACKAGE}.{door}" for door in DOORS)
    for path in (ROOT / PACKAGE / "cli").glob("*.py"):
        yield f"{PACKAGE}.cli.{path.stem}"
    for page in _pages():
        yield from _IN_PAGES.findall(page.read_text())
    # Modules that the package imports late or starts as processes are named in strings.
    yield from _started()


def _pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from (ROOT / "docs").rglob("*.md")


def _started() -> Iterator[str]:
    for path in (ROOT / PACKAGE).rglob("*.py"):
        yield from _STARTED.findall(path.read_text())


class Names:
    """Names of the package, and which of them reached code has.

    A name is used where it stands alone, behind its module, or, of a method, behind any dot.
    """

    def __init__(self) -> None:
        self.trees = {_module_of(path): _tree(path) for path in (ROOT / PACKAGE).rglob("*.py")}
        self.tops: dict[_Name, list[ast.stmt]] = defaultdict(list)
        self.imports: dict[str, dict[str, tuple[str, str]]] = {}
        for module, tree in self.trees.items():
            self.imports[module] = dict(_imported(tree))
            for name, statement in _defined(tree.body):
                self.tops[module, name].append(statement)
        self.started = {module for module in _started() if module in self.trees}
        self.reached: set[_Name] = set()
        self.attributes: set[str] = set()
        self._loaded: set[str] = set()
        self._waiting: list[_Name] = []
        self._methods: dict[str, list[tuple[str, str, ast.stmt]]] = defaultdict(list)
        """By name, those of reached classes that nobody has asked for: module, class, method."""

    def left(self) -> tuple[str, ...]:
        """Return what no reached code has the name of, in order."""
        tops = (name for name in self.tops if name not in self.reached and name[1] != "__all__")
        methods = (f"{m}.{c}.{name}" for name, of in self._methods.items() for m, c, _ in of)
        found = sorted([*(".".join(name) for name in tops), *methods])
        asked = {f"{PACKAGE}.{name}" for name in FOR_TESTS}
        return tuple(name for name in found if name not in asked)

    def reach(self) -> None:
        """Go on from the roots until nothing is new."""
        for module in {*_roots(), *self.started} & self.trees.keys():
            self._load(module)
            is_door = module.rpartition(".")[2] in DOORS or module.startswith(f"{PACKAGE}.cli")
            for name in [name for of, name in self.tops if of == module]:
                if (is_door and not name.startswith("_")) or name == "main":
                    self._use(module, name)
        for module, name in self.tops:
            if module.startswith(GIVEN) and not name.startswith("_"):
                self._use(module, name)
        for name in _asked_by_megatron():
            self._use_attribute(name)
        for page in _pages():
            for module, names, path in _NAMED_IN_PAGES.findall(page.read_text()):
                for name in names.split(","):
                    self._use(module, name.strip())
                self._use(*path.rpartition(".")[::2])
        for maker in (path for glob in MAKERS for path in (ROOT / "tools").glob(f"{glob}.py")):
            tree = _tree(maker)
            self._read(tree, dict(_imported(tree)), "")
        while self._waiting:
            module, name = self._waiting.pop()
            self._load(module)
            for statement in self.tops[module, name]:
                if isinstance(statement, ast.ClassDef):
                    self._read_class(module, statement)
                else:
                    self._read(statement, self.imports[module], module)

    def _load(self, module: str) -> None:
        """Read what an import runs: all but definitions and plain assignments."""
        if module in self._loaded or module not in self.trees:
            return
        self._loaded.add(module)
        for statement in self.trees[module].body:
            if isinstance(statement, _Def):
                # A decorator that registers what it decorates is a use of it.
                for decorator in statement.decorator_list:
                    self._read(decorator, self.imports[module], module)
                    if not isinstance(statement, ast.ClassDef) and not _is_plain(decorator):
                        self._use(module, statement.name)
            elif not isinstance(statement, ast.Assign | ast.AnnAssign) or (
                isinstance(statement, ast.Assign)
                and not all(isinstance(t, ast.Name | ast.Tuple) for t in statement.targets)
            ):
                self._read(statement, self.imports[module], module)

    def _use(self, module: str, name: str) -> None:
        if (found := self._found(module, name)) is not None and found not in self.reached:
            self.reached.add(found)
            self._waiting.append(found)

    def _found(self, module: str, name: str) -> _Name | None:
        """Return where a name of a module is defined, through any number of imports."""
        seen = set()
        while (module, name) not in self.tops:
            if (module, name) in seen or name not in self.imports.get(module, {}):
                return None
            seen.add((module, name))
            module, name = self.imports[module][name]
        return module, name

    def _use_attribute(self, name: str) -> None:
        if name in self.attributes:
            return
        self.attributes.add(name)
        for module in self.started:
            self._use(module, name)
        for module, _, method in self._methods.pop(name, []):
            self._read(method, self.imports[module], module)

    def _read(self, node: ast.AST, imports: dict[str, tuple[str, str]], module: str) -> None:
        """Follow every name in a piece of code."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                self._use(*((module, part.id) if module else imports.get(part.id, ("", ""))))
            elif isinstance(part, ast.Attribute):
                base = part.value.id if isinstance(part.value, ast.Name) else ""
                of = ".".join(imports.get(base, (base, "")))
                self._use(of.rstrip("."), part.attr)
                self._use_attribute(part.attr)
            elif isinstance(part, ast.ImportFrom) and part.module:
                self._load(part.module)
                for alias in part.names:
                    self._load(f"{part.module}.{alias.name}")
            elif isinstance(part, ast.Constant) and part.value in self.trees:
                self._load(part.value)
            elif isinstance(part, ast.Call) and getattr(part.func, "id", "") in _BY_NAME:
                for given in part.args:
                    if isinstance(given, ast.Constant) and isinstance(given.value, str):
                        self._use_attribute(given.value)

    def _read_class(self, module: str, statement: ast.ClassDef) -> None:
        is_own = all(self._is_own(module, base) for base in statement.bases)
        for part in ast.iter_child_nodes(statement):
            is_method = isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(part, ast.ClassDef):
                self._read_class(module, part)
            elif (
                not is_method
                or not is_own
                or part.name.startswith("__")
                or part.name in self.attributes
                or not all(map(_is_plain, part.decorator_list))
            ):
                self._read(part, self.imports[module], module)
                # A class's own statements may name its methods.
                if not is_method:
                    for name in (n.id for n in ast.walk(part) if isinstance(n, ast.Name)):
                        self._use_attribute(name)
            else:
                self._methods[part.name].append((module, statement.name, part))

    def _is_own(self, module: str, base: ast.expr) -> bool:
        """Tell if a class calls only what the package's own code calls."""
        name = ast.unparse(base).partition("[")[0]
        found = self._found(module, name)
        if found is None:
            return name in _PLAIN_BASES
        return all(
            self._is_own(found[0], above)
            for statement in self.tops[found]
            if isinstance(statement, ast.ClassDef)
            for above in statement.bases
        )


def _asked_by_megatron() -> set[str]:
    """Return the names that stand behind a dot in Megatron's code."""
    spec = find_spec("megatron")
    folders = () if spec is None else spec.submodule_search_locations or ()
    texts = (path.read_text() for folder in folders for path in Path(folder).rglob("*.py"))
    return {name for text in texts for name in re.findall(r"\.(\w+)", text)}


def _is_plain(decorator: ast.expr) -> bool:
    """Tell if a decorator leaves it to callers to use what it decorates."""
    name = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
    return name in {
        "abstractmethod", "cache", "cached_property", "classmethod", "contextmanager", "dataclass",
        "lru_cache", "override", "property", "setter", "staticmethod", "no_grad",
    }  # fmt: skip


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for part in ast.walk(tree):
        if isinstance(part, ast.ImportFrom) and part.module:
            for alias in part.names:
                yield alias.asname or alias.name, (part.module, alias.name)


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names at the top of a module, also under `if` and `try`."""
    for statement in body:
        if isinstance(statement, _Def):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = getattr(statement, "targets", None) or [statement.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, statement
        elif isinstance(statement, ast.If | ast.Try):
            yield from _defined(statement.body)
            yield from _defined(statement.orelse)


def unreached_names() -> tuple[str, ...]:
    """Return functions, classes, methods and constants that no reached code has the name of."""
    names = Names()
    names.reach()
    return names.left()


if __name__ == "__main__":
    found = (*unreached(), *unreached_names())
    print("\n".join(found) or "everything is reached")
    sys.exit(1 if found else 0)
