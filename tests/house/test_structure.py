"""The house: who may import whom, where tests lie, what pages name, and how large functions are."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

import offspec

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "loaders", "scheduler", "offspec", "cli")
MODULES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "LOG.md"),  # it tells of other days
]

# Folder → what it may import of offspec, outside itself. Imports point one way (docs/developing/architecture.md).
ALLOWED = {
    "backends": r"offspec\.(errors|user_folders\..+)",
    "loaders": r"offspec\.(errors|(user_folders|backends)\..+)",
    "scheduler": r"offspec\.errors",
    "offspec": r"offspec\.(backends|loaders|scheduler)(\..+)?",
    # The public names, and the rooms that exist for commands: reports, training, and texts of the server's protocol.
    "cli": rf"offspec(\.({'|'.join(offspec.__all__)}|errors|builtin)"
    r"|\.(tools|research|user_files|text\.(grammar_library|infill|thinking|tool_calls|tokenizer))(\..+)?)?",
}
# The server shares one engine among many texts, so these modules alone know more of it.
SERVICE = [ROOT / "cli" / "server" / name for name in ("service.py", "constraint_queue.py", "fair_thread.py")]
ALLOWED_IN_SERVICE = r"offspec\.(engine|running|session|text|model\.memory\.text_pool|planning\.parked_texts)(\..+)?"
# The rooms of offspec/ (a folder or a module each), from the ground up: a room imports from lower floors alone.
FLOORS = (
    ("errors", "user_folders", "methods", "notes", "stats", "background", "process", "builtin"),
    ("text", "model", "named_models", "load_options"),
    ("checkpoints",),
    ("planning", "user_files"),
    ("drafts", "loaded_target"),
    ("loading",),
    ("running",),
    ("engine",),
    ("prompt_cache",),
    ("session", "tools"),
    ("research",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# What weight formats may know of loading.
UNDER_FORMATS = {"files.checkpoint", "files.gguf_types", "files.records", "params", "registry"}
RESEARCH = "offspec.research"
# These two stand for the package as it is installed, all four folders, not for the folder they lie in.
FRONT_DOORS = (ROOT / "offspec" / "__init__.py", ROOT / "offspec" / "__main__.py")


@dataclass(frozen=True)
class Import:
    """One `import name`, or one name of `from module import name`, also for types only; level counts the dots."""

    file: Path
    line: int
    name: str
    level: int

    @property
    def folder(self) -> str:
        return self.file.relative_to(ROOT).parts[0]

    @cached_property
    def target(self) -> str | None:
        """The module of ours that is imported, by its full name; None where it is somebody else's."""
        package = name_of(self.file).split(".")
        if self.file.name != "__init__.py":
            package.pop()
        above = package[: len(package) - self.level + 1] if self.level else []
        parts = [*above, *self.name.split(".")]
        found = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((name for name in found if name in NAMES), None)

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {'.' * self.level}{self.name}"


def name_of(file: Path) -> str:
    """A module's full name: loaders/formats/core.py is offspec.loaders.formats.core."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "offspec" else ["offspec", *parts])


NAMES = {name_of(file) for file in MODULES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def statements_of(file: Path) -> list[ast.AST]:
    """All of them, inner ones too, with the parts that they have: handlers and cases."""
    found: list[ast.AST] = [tree_of(file)]
    for node in found:
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, name, None)
            found += inner if isinstance(inner, list) else ()
    return found


@pytest.fixture(scope="module", autouse=True)
def _drop_trees() -> Iterator[None]:
    """Each file is parsed once, and collections of garbage after these tests look at no tree."""
    yield
    for function in (tree_of, statements_of, all_functions):
        function.cache_clear()


def imports_of(file: Path) -> Iterator[Import]:
    for node in statements_of(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, 0)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(file, node.lineno, _joined(node.module, alias.name), node.level)


def _joined(module: str | None, name: str) -> str:
    """`from offspec import errors` and `from offspec.errors import X` both name offspec.errors;
    a class is no module.
    """
    parts = [*(module.split(".") if module else []), name]
    return ".".join(part for i, part in enumerate(parts) if i == 0 or re.fullmatch(r"_*[a-z][a-z0-9_]*", part))


@cache
def all_imports() -> list[Import]:
    """Of every module but the two front doors."""
    return [found for file in MODULES if file not in FRONT_DOORS for found in imports_of(file)]


def test_the_walk_sees_the_house() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in MODULES} == set(FOLDERS)
    seen = {(found.folder, found.name) for found in all_imports()}
    assert ("offspec", "offspec.scheduler.params") in seen
    assert ("scheduler", "offspec.errors") in seen


def test_imports_across_folders_point_one_way() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.level == 0
        and found.name.split(".")[0] == "offspec"
        and not re.fullmatch(ALLOWED[found.folder], found.name)
        and not (found.file in SERVICE and re.fullmatch(ALLOWED_IN_SERVICE, found.name))
    ]
    assert wrong == []


def room_of(module: str) -> str | None:
    """The room of offspec/ that a module is in; None for the other folders' modules and the two front doors."""
    name = module.partition(".")[2].partition(".")[0]
    return None if name in (*FOLDERS, "__main__", "") else name


def arrows() -> Iterator[tuple[Import, str, str]]:
    """Imports of offspec/ that lead from one room to another, with the two."""
    for found in all_imports():
        if found.folder == "offspec" and found.target is not None:
            here, there = room_of(name_of(found.file)), room_of(found.target)
            if here is not None and there is not None and here != there:
                yield found, here, there


def test_every_room_has_its_floor() -> None:
    assert {room for name in NAMES if (room := room_of(name)) is not None} == set(FLOOR_OF)
    assert {("running", "drafts"), ("drafts", "planning"), ("model", "errors")} <= {arrow[1:] for arrow in arrows()}


def test_between_rooms_imports_point_down() -> None:
    """So that there is no circle: a room that imports a second one is not imported by it, by whatever way round."""
    assert [str(found) for found, here, there in arrows() if FLOOR_OF[here] <= FLOOR_OF[there]] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    known: dict[str, set[str]] = {name: set() for name in NAMES}
    for found in all_imports():
        if found.target is not None:
            known[name_of(found.file)].add(found.target)
    while leaves := {name for name, targets in known.items() if not targets}:
        known = {name: targets - leaves for name, targets in known.items() if name not in leaves}
    assert known == {}, "what is left imports each other in a circle"


def test_formats_are_a_room_of_their_folder() -> None:
    pairs = {(name_of(found.file), found.target) for found in all_imports() if found.target is not None}
    under = {there for here, there in pairs if here.startswith("offspec.loaders.formats")}
    under = {name.removeprefix("offspec.loaders.") for name in under if name.startswith("offspec.loaders.")}
    assert {name for name in under if not name.startswith("formats")} == UNDER_FORMATS


def test_the_core_imports_nothing_from_research() -> None:
    """It asks for research's methods by name (`offspec.methods`)."""
    importers = {name_of(found.file) for found in all_imports() if f"{found.target}.".startswith(f"{RESEARCH}.")}
    assert {name for name in importers if not name.startswith(("offspec.research", "offspec.cli."))} == set()


def test_only_the_front_door_names_research() -> None:
    naming = {file.relative_to(ROOT) for file in MODULES if RESEARCH in file.read_text(encoding="utf-8")}
    outside = {str(file) for file in naming if file.parts[0] != "cli" and file.parent != Path("offspec/research")}
    assert outside == {"offspec/__init__.py"}


def test_no_folder_is_imported_as_a_package_of_its_own() -> None:
    """`import loaders` would be a second copy of every class."""
    names = {*FOLDERS, "tests"} - {"offspec"}
    assert [str(found) for found in all_imports() if found.level == 0 and found.name.split(".")[0] in names] == []


def test_relative_imports_stay_inside_their_folder() -> None:
    outside = []
    for found in all_imports():
        leaves = found.level > len(found.file.relative_to(ROOT).parts) - 1
        names_another = found.folder == "offspec" and found.name.split(".")[0] in {*FOLDERS} - {"offspec"}
        if found.level and (leaves or names_another):
            outside.append(str(found))
    assert outside == []


def test_inside_a_folder_imports_are_relative() -> None:
    """One spelling, so that a folder can be read on its own."""
    absolute = [
        str(found)
        for found in all_imports()
        if found.level == 0 and found.folder != "offspec" and found.name.startswith(f"offspec.{found.folder}")
    ]
    assert absolute == []


def test_only_the_cli_knows_the_terminal() -> None:
    assert [str(found) for found in all_imports() if found.folder != "cli" and re.match(r"click\b", found.name)] == []


def test_the_ground_floor_imports_nothing() -> None:
    assert list(imports_of(ROOT / "offspec" / "errors.py")) == []


def test_every_module_says_what_it_is_for() -> None:
    trees = {file: tree_of(file) for file in MODULES}
    assert [str(file) for file, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_tests_lie_in_the_folder_of_what_they_test() -> None:
    """Each folder of modules has a folder of tests; there, a test file with a module's name tests that module."""
    modules = [file.relative_to(ROOT) for file in MODULES if not file.name.startswith("__")]
    folders = {module.parent for module in modules}
    tests = [file.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")]
    assert folders - {test.parent for test in tests} == set()
    homes = {module.stem: {other.parent for other in modules if other.stem == module.stem} for module in modules}
    names = [(test, test.stem.removeprefix("test_")) for test in tests if test.parent in folders]
    assert [str(test) for test, name in names if name in homes and test.parent not in homes[name]] == []


def test_what_runs_nightly_alone_says_why() -> None:
    """A whole test or file; a value of a parameter is one more beside those of the default run."""
    bare = re.compile(r"^(@|pytestmark = )pytest\.mark\.nightly$", re.MULTILINE)
    assert [str(file) for file in (ROOT / "tests").rglob("*.py") if bare.search(file.read_text(encoding="utf-8"))] == []


def test_files_that_a_page_names_are_there() -> None:
    folders = "backends|loaders|scheduler|offspec|cli|benchmarks|tests|scripts|docs"
    pattern = re.compile(rf"\b(?:{folders})/[\w/.-]*\.(?:py|md|svg)")
    named = {(page.name, name) for page in PAGES for name in pattern.findall(page.read_text(encoding="utf-8"))}
    assert [pair for pair in named if "NAME" not in pair[1] and not (ROOT / pair[1]).exists()] == []


def test_classes_that_a_page_names_are_there() -> None:
    """Of ours, torch's or another's: somewhere in the code the name stands."""
    files = (file for folder in (*FOLDERS, "tests") for file in (ROOT / folder).rglob("*.py"))
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    spans = " ".join(span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    assert set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", spans)) <= words


def test_the_architecture_names_every_room() -> None:
    """Rooms of `offspec/` by their names alone, those of other folders with the folder."""
    text = (ROOT / "docs" / "developing" / "architecture.md").read_text(encoding="utf-8")
    rooms = {str(file.parent.relative_to(ROOT)) for file in MODULES}
    assert {room for room in rooms if f"`{room.removeprefix('offspec/')}/`" not in text} == set()


# ------------------------------------------------------------------------------------------------ sizes

MOST_COLUMNS, MOST_PARAMETERS = 120, 8
MOST_LINES = {"median": 8, "90 %": 20, "longest": 60}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(file: Path) -> Iterator[Function]:
    """All of them, methods and inner ones too."""
    yield from (node for node in statements_of(file) if isinstance(node, Function))


@cache
def all_functions() -> list[tuple[Path, Function]]:
    return [(file, function) for file in MODULES for function in functions_of(file)]


def num_lines(function: Function) -> int:
    """From `def` to its last line, the docstring too; decorators are not counted."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters_of(function: Function) -> list[str]:
    """Those that have names, without self and cls."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def is_click_command(function: Function) -> bool:
    """Whose parameters are the command line's flags."""
    called = (decorator.func for decorator in function.decorator_list if isinstance(decorator, ast.Call))
    return any(isinstance(name, ast.Attribute) and name.attr in ("command", "group") for name in called)


def is_gpu_kernel(function: Function) -> bool:
    """Whether it is Triton's, which takes each pointer, size and constant by itself."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def place(file: Path, function: Function) -> str:
    return f"{file.relative_to(ROOT)}:{function.lineno} {function.name}"


def test_most_functions_are_short() -> None:
    lines = sorted(num_lines(function) for _, function in all_functions())
    assert lines[len(lines) // 2] <= MOST_LINES["median"]
    assert lines[9 * len(lines) // 10] <= MOST_LINES["90 %"]


def test_no_function_is_too_long() -> None:
    found = [
        f"{place(file, function)}: {num_lines(function)} lines"
        for file, function in all_functions()
        if num_lines(function) > MOST_LINES["longest"]
    ]
    assert found == []


def test_no_function_takes_too_much() -> None:
    """Where more is needed, parameters that mean something together become a value."""
    found = [
        f"{place(file, function)}: {len(parameters_of(function))} parameters"
        for file, function in all_functions()
        if len(parameters_of(function)) > MOST_PARAMETERS
        and not (is_click_command(function) or is_gpu_kernel(function))
    ]
    assert found == []


def test_what_is_counted() -> None:
    """The measures above, on a function whose size is known."""
    source = "@click.command()\ndef f(self, a, /, b, *c, d, **e):\n    def g():\n        pass\n"
    outer, inner = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))
    assert (num_lines(outer), num_lines(inner)) == (3, 2)
    assert (parameters_of(outer), parameters_of(inner)) == (["a", "b", "d"], [])
    assert (is_click_command(outer), is_click_command(inner)) == (True, False)


def test_values_are_named_for_what_they_are() -> None:
    """None is named with a word that says nothing of it (STYLE), and every class has a name of its own."""
    vague = {"found", "said", "own", "known", "asked", "what", "told", "hang", "tell"}
    nodes = [(file, node) for file in MODULES for node in ast.walk(tree_of(file))]
    names = [(file, node, node.id) for file, node in nodes if isinstance(node, ast.Name) and is_stored(node)]
    names += [(file, node, node.arg) for file, node in nodes if isinstance(node, ast.arg)]
    assert [f"{file.relative_to(ROOT)}:{node.lineno} {name}" for file, node, name in names if name in vague] == []
    classes = Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def test_no_line_is_too_long() -> None:
    """Code, comments and docstrings; a line that is wider than half a screen is not read."""
    files = (file for folder in (*FOLDERS, "benchmarks", "scripts", "tests") for file in (ROOT / folder).rglob("*.py"))
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert found == []


def test_one_version() -> None:
    from offspec import __version__

    told = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert told is not None
    assert told[1] == __version__
