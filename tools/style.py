"""Check the rules of style that ruff does not have, and count their finds per file.

    python tools/style.py            print every find
    python tools/style.py --update   rewrite the list of allowed finds

Owns the rules and `tests/style_allowed.txt`, which lists `path: rule: count`. The list may only
shrink. The weights of `budget.py` are in it, too. The words that are not used come from
docs/glossary.md, so this file has none of its own.
"""

import argparse
import ast
import gc
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import budget
import prose

ROOT: Final = Path(__file__).resolve().parent.parent
ALLOWED: Final = ROOT / "tests" / "style_allowed.txt"
GLOSSARY: Final = ROOT / "docs" / "glossary.md"

#: Longer functions do not fit a screen.
FUNCTION_LINES_MAX: Final = 70

#: A file with fewer lines of code that one file imports belongs in that file.
CODE_LINES_MIN: Final = 60

#: The rule of the nouns that name nothing.
NOUNS: Final = "nouns in 10,000 words"

#: Modules that end in -ing and are named for a thing.
THINGS: Final = ("encoding", "keyring", "pending", "testing", "tuning")

#: Names of dialects, as words or inside identifiers. "native" is an ordinary word and not checked.
DIALECTS: Final = re.compile(r"dwork|ping[-_ ]?pong|round[-_ ]?robin|wmp|lmq|hungry", re.IGNORECASE)

#: Attributes that a session or a frame of a Spark Connect server does not have.
DRIVER_ONLY: Final = ("sparkContext", "rdd", "_jvm", "_jsc", "_jdf", "_sc")

#: Names of the module of Spark's column functions. The `broadcast` of this module is a hint for a
#: join.
COLUMN_FUNCTIONS: Final = ("f", "F")

#: The start of a sentence without a subject that has a name. Questions are allowed.
NO_SUBJECT: Final = re.compile(
    r"(?:^|[.!?:]\s+)((?:Who|Whoever|Whose|What|Somebody|Someone|Nobody)\b[^.!?]*(?:[.!?]|$))"
)


class Find(NamedTuple):
    """A line that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{shown(self.path)}:{self.line}: {self.rule}: {self.text}"


# -- The files


def shown(path: Path) -> str:
    """Return a path relative to the checkout, if it is inside."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def source_files() -> list[Path]:
    """Return the Python files of the product and its tools, without generated files."""
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), ROOT / "yard"]
    return sorted(path for path in found if not path.stem.endswith("_pb2"))


def pages() -> list[Path]:
    """Return the pages of the documentation but the glossary, which lists the unused words."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in found if path != GLOSSARY)


# The syntax tree of one file is kept, not of all: they take half a gigabyte.


@lru_cache(maxsize=1)
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@lru_cache(maxsize=1)
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree, in the order of `ast.walk`.

    Without the contexts of names (load, store), which no rule reads and which are a third of all.
    """
    found: list[ast.AST] = [tree_of(path)]
    for node in found:  # grows
        for part in vars(node).values():
            if isinstance(part, list):
                found += [one for one in part if isinstance(one, ast.AST)]
            elif isinstance(part, ast.AST) and not isinstance(part, ast.expr_context):
                found.append(part)
    return found


@lru_cache(maxsize=1)
def statements_of(path: Path) -> list[ast.AST]:
    """Return the module and its statements. Most rules read no expressions, which are many."""
    blocks = (ast.stmt, ast.excepthandler, ast.match_case)
    found: list[ast.AST] = [tree_of(path)]
    for node in found:  # grows
        for part in vars(node).values():
            if isinstance(part, list):
                found += [one for one in part if isinstance(one, blocks)]
    return found


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers."""
    return enumerate(path.read_text().splitlines(), start=1)


# -- Words


@cache
def unused_words(heading: str) -> tuple[str, ...]:
    """Return the words in backticks in the first column of the table under a glossary heading."""
    _, _, section = GLOSSARY.read_text().partition(f"## {heading}\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return tuple(word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1]))


@cache
def word_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Match words, singular or plural, in prose and inside identifiers of any spelling."""
    small, capitalised, capitals = (
        "|".join(spell(word) for word in words) for spell in (str.lower, str.title, str.upper)
    )
    return re.compile(
        rf"(?:(?<![A-Za-z])(?:{small})|(?:{capitalised}))(?:s|es)?(?![a-z])"
        rf"|(?<![A-Za-z])(?:{capitals})(?:S|ES)?(?![A-Za-z])"
    )


def invented_words(path: Path) -> Iterator[Find]:
    """Find invented words anywhere in a file."""
    pattern = word_pattern(unused_words("Invented words"))
    for number, line in lines_of(path):
        for found in pattern.finditer(line):
            yield Find(path, number, "invented word", found[0])


def words_of_other_systems(path: Path) -> Iterator[Find]:
    """Find names that contain another system's word for a term of the glossary."""
    pattern = word_pattern(words_not_in_core())
    for node in nodes_of(path):
        for name in names_of(node):
            for found in pattern.finditer(name):
                yield Find(path, getattr(node, "lineno", 1), "other word in core", found[0])


@cache
def words_not_in_core() -> tuple[str, ...]:
    """Return the words in backticks in the third column of the glossary's terms."""
    terms = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| **")]
    words = [word for line in terms for word in re.findall(r"`(\w+)`", line.split("|")[3])]
    return (*words, "vertices", "proxies")


def names_of(node: ast.AST) -> list[str]:
    """Return the names in a node: of variables, attributes, arguments, functions, modules."""
    fields = ("id", "attr", "arg", "name", "asname")
    names = [getattr(node, field, None) for field in fields]
    return [name for name in names if isinstance(name, str)]


def old_names(path: Path) -> Iterator[Find]:
    """Find modules and classes with names that the glossary replaces."""
    replaced = unused_words("Names of modules and classes")
    if path.stem in replaced:
        yield Find(path, 1, "replaced name", path.stem)
    for node in statements_of(path):
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_").lower() in replaced:
            yield Find(path, node.lineno, "replaced name", node.name)


def sentences_without_subject(path: Path) -> Iterator[Find]:
    """Find docstrings with a sentence that starts with who, what, somebody or nobody."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in statements_of(path):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            line = node.body[0].lineno
            for found in NO_SUBJECT.finditer(re.sub(r"\s+", " ", docstring)):
                if not found[1].endswith("?"):
                    yield Find(path, line, "sentence without subject", found[1])


def comment_semicolons(path: Path) -> Iterator[Find]:
    """Find comments with a semicolon: they are two sentences."""
    code = path.read_text()
    if not re.search(r"#.*;", code):  # to tokenize every file takes seconds
        return
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and ";" in token.string:
            yield Find(path, token.start[0], "semicolon in comment", token.string)


def error_sentences(path: Path) -> Iterator[Find]:
    """Find raised errors with several sentences: they read `subject: problem (hint)`.

    An internal error may ask for a report.
    """
    for node in statements_of(path):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for text in map(literal_text, node.exc.args):
                if re.search(r";|\.( [A-Z]|$)", text) and "Please report" not in text:
                    yield Find(path, node.lineno, "sentences in an error", text)


def literal_text(node: ast.expr) -> str:
    """Return the text of a string with {} for its values, or "" for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = node.values if isinstance(node, ast.JoinedStr) else ()
    return "".join(literal_text(part) or "{}" for part in parts)


def sets(path: Path) -> Iterator[Find]:
    """Find sets. The core has none, because their order is not deterministic."""
    for node in nodes_of(path):
        named = isinstance(node, ast.Name) and node.id in ("set", "frozenset")
        if named or isinstance(node, ast.Set | ast.SetComp):
            yield Find(path, getattr(node, "lineno", 1), "set in core", ast.unparse(node))


def dialect_names(path: Path) -> Iterator[Find]:
    """Find names of dialects. The core has none."""
    for number, line in lines_of(path):
        for found in DIALECTS.finditer(line):
            yield Find(path, number, "dialect in core", found[0])


def driver_only_names(path: Path) -> Iterator[Find]:
    """Find names of Spark that need the driver in this process. A Connect server has it there."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            is_broadcast = node.attr == "broadcast" and owner not in COLUMN_FUNCTIONS
            if is_broadcast or node.attr in DRIVER_ONLY:
                yield Find(path, node.lineno, "not in Spark Connect", ast.unparse(node))


# -- Modules


def activity_modules(path: Path) -> Iterator[Find]:
    """Find a module that is named for an activity."""
    if path.stem.endswith("ing") and path.stem not in THINGS:
        yield Find(path, 1, "named for an activity", path.stem)


def missing_docstrings(path: Path) -> Iterator[Find]:
    """Find a file that does not open with a docstring."""
    if not ast.get_docstring(tree_of(path)):
        yield Find(path, 1, "no docstring", path.name)


def long_functions(path: Path) -> Iterator[Find]:
    """Find functions that do not fit a screen."""
    for node in statements_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield Find(path, node.lineno, "long function", f"{node.name}: {lines} lines")


def star_tuples(path: Path) -> Iterator[Find]:
    """Find calls with arguments packed in a literal, `f(*(0, route))`: they are passed by name."""
    for node in nodes_of(path) if "*(" in path.read_text() else ():
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple):
                    yield Find(path, node.lineno, "star tuple", ast.unparse(argument))


def any_dicts(path: Path) -> Iterator[Find]:
    """Find `**values: Any`: a struct or parameters say what comes."""
    for node in statements_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rest = node.args.kwarg
            if rest and rest.annotation and ast.unparse(rest.annotation) == "Any":
                yield Find(path, node.lineno, "arguments of any type", node.name)


def sentence_beginnings(path: Path) -> Iterator[Find]:
    """Find sentences that begin with a word for nothing."""
    for line, text in prose_of(path).beginnings:
        yield Find(path, line, "beginning of a sentence", text)


@cache
def prose_of(path: Path) -> prose.Survey:
    """Look through the prose of a source file or a page."""
    text = path.read_text()
    if path.suffix == ".md":
        return prose.survey(prose.passages_of_page(text))
    return prose.survey(prose.passages_of_code(text))


def small_files(sources: Iterable[Path]) -> Iterator[Find]:
    """Find short files that only one other file imports."""
    modules = {module_name(path): path for path in sources}
    importers = Counter(name for path in modules.values() for name in imports_of(path, modules))
    for name, path in modules.items():
        if importers[name] == 1 and not path.stem.startswith("__"):
            lines = budget.code_lines(path)
            if lines < CODE_LINES_MIN:
                yield Find(path, 1, "small file", f"{lines} lines of code, one importer")


def import_cycles(sources: Iterable[Path]) -> Iterator[Find]:
    """Find modules that import each other. Imports for types and inside functions count too."""
    modules = {module_name(path): path for path in sources}
    graph = {name: imports_of(path, modules) for name, path in modules.items()}
    for name, path in modules.items():
        reached = reachable(graph, name)
        if name in reached:
            others = [one for one in sorted(reached - {name}) if name in reachable(graph, one)]
            yield Find(path, 1, "import cycle", f"with {', '.join(others)}")


def module_name(path: Path) -> str:
    """Return the dotted name by which a file is imported."""
    for root in (ROOT / "src", ROOT / "tools"):
        if path.is_relative_to(root):
            parts = path.relative_to(root).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return path.stem


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Return every dotted name that a file imports. They are absolute: ruff sees to that."""
    names: set[str] = set()
    for node in statements_of(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imports_of(path: Path, modules: Iterable[str]) -> set[str]:
    """Return the modules that a file imports, out of these."""
    found, own = set(), module_name(path)
    for name in imported_names(path):
        module = name if name in modules else name.rpartition(".")[0]
        if module in modules and module != own:
            found.add(module)
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that one reaches by imports, itself only through a cycle."""
    reached: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    return reached


# -- All rules, and the list of allowed finds

FileRule = Callable[[Path], Iterator[Find]]

SOURCE_RULES: Final[tuple[FileRule, ...]] = (
    invented_words,
    old_names,
    sentences_without_subject,
    comment_semicolons,
    error_sentences,
    activity_modules,
    missing_docstrings,
    long_functions,
    star_tuples,
    any_dicts,
    sentence_beginnings,
)
CORE_RULES: Final[tuple[FileRule, ...]] = (words_of_other_systems, sets, dialect_names)

CORE: Final = ROOT / "src" / "taskyard" / "core"

#: The packages that use Spark.
SPARK_PACKAGES: Final = tuple(
    ROOT / "src" / name for name in ("taskyard/pipeline", "pyspark_taskyard")
)


def finds() -> list[Find]:
    """Return every find in the checkout."""
    gc.disable()  # it would look through every syntax tree, and none of them is garbage
    sources = source_files()
    found = [find for path in sources for find in finds_in(path)]
    for path in pages():
        found += invented_words(path)
        found += sentence_beginnings(path) if prose_owner(path) else ()
    gc.enable()
    return [*found, *small_files(sources), *import_cycles(sources)]


def noun_weights() -> Counter[tuple[str, str]]:
    """Return the nouns that name nothing, in 10,000 words, where there are more than allowed."""
    words, nouns = Counter[str](), Counter[str]()
    for path in (*source_files(), *pages()):
        if owner := prose_owner(path):
            words[owner] += prose_of(path).words
            nouns[owner] += prose_of(path).nouns
    rates = {(owner, NOUNS): 10_000 * nouns[owner] // count for owner, count in words.items()}
    return Counter({place: rate for place, rate in rates.items() if rate > prose.NOUNS_MAX})


def prose_owner(path: Path) -> str:
    """Return the package of a file, "docs" or "tools", or "" for a decision, which has a date."""
    if path.is_relative_to(budget.SOURCE):
        return budget.package_of(path)
    if path.suffix == ".md":
        return "" if path.parent.name == "decisions" else "docs"
    return "tools"


def finds_in(path: Path) -> list[Find]:
    """Return the finds in one source file. The file's imports are kept for the rules of modules."""
    rules = [*SOURCE_RULES]
    if path.is_relative_to(CORE):
        rules += CORE_RULES
    if any(path.is_relative_to(package) for package in SPARK_PACKAGES):
        rules.append(driver_only_names)
    imported_names(path)
    return [find for rule in rules for find in rule(path)]


def counts(found: Iterable[Find]) -> Counter[tuple[str, str]]:
    """Count finds by path and rule."""
    return Counter((shown(find.path), find.rule) for find in found)


def allowed_counts() -> Counter[tuple[str, str]]:
    """Return the counts in the list of allowed finds and weights."""
    rows = [line.rsplit(": ", 2) for line in ALLOWED.read_text().splitlines()]
    return Counter({(path, rule): int(count) for path, rule, count in rows})


def write_allowed(found: Counter[tuple[str, str]]) -> None:
    """Rewrite the list of allowed finds and weights."""
    rows = [f"{path}: {rule}: {count}\n" for (path, rule), count in sorted(found.items())]
    ALLOWED.write_text("".join(rows))


def main(arguments: list[str]) -> int:
    """Print every find, or rewrite the list of allowed finds."""
    parser = argparse.ArgumentParser(prog="style.py", description="Check the rules of style.")
    parser.add_argument(
        "--update", action="store_true", help="rewrite the list, and the table of weights"
    )
    options = parser.parse_args(arguments)
    found = finds()
    for find in found if not options.update else ():
        print(find)
    for rule, count in sorted(Counter(find.rule for find in found).items()):
        print(f"{rule}: {count}")
    if options.update:
        weights = budget.weights()
        write_allowed(counts(found) + weights + noun_weights())
        budget.PAGE.write_text(budget.page_with(budget.table(weights)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
