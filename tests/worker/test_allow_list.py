"""Names that allowed modules must not give away, as call names and in plain pickles."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pytest

from taskyard.calls.pickled import guarded, pickle_call
from taskyard.calls.plain_pickles import PlainLoader
from taskyard.errors import UserError
from taskyard.worker import allow_list
from taskyard.worker.allow_list import AllowList
from tests.wire.test_plain_pickles import END, glob

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A package of a user, which uses whatever it likes, and offers `greet`, `Own` and what is listed.
PACKAGE: Final = """
import abc, collections, ctypes, datetime, functools, logging, operator, os, subprocess, sys
import threading, types, unittest.mock, weakref
from os.path import join
from pathlib import Path
from subprocess import Popen, getoutput
import taskyard
from mymod import _core
from mymod._core import compute, Table

__all__ = ["greet", "listed", "listed_partial", "Path", "lazy_listed", "_listed"]

SECRET = "hunter2"

def greet(name="you"): return "hello " + name
def _hidden(): return SECRET
def _listed(): return SECRET
def __getattr__(name):
    if name == "lazy_listed": return greet
    if name == "lazy": return getoutput
    raise AttributeError(name)

listed = getoutput
listed_partial = functools.partial(greet, "all")
run_partial = functools.partial(getoutput, "id")
wrapped_partial = functools.update_wrapper(functools.partial(getoutput, "id"), greet)
cached = functools.lru_cache(getoutput)
static = staticmethod(getoutput)
bound = types.MethodType(getoutput, "id")
caller = operator.methodcaller("system", "id")
set_attribute = object.__setattr__
get_attribute = object.__getattribute__
set_in_module = sys.modules[__name__].__setattr__
upper = str.upper
from_keys = dict.__dict__["fromkeys"]
now = datetime.datetime.now
joined = ", ".join
write = sys.stdout.write
log = logging.getLogger("mymod").info
remote = taskyard.task(getoutput)
remote_partial = taskyard.task(functools.partial(getoutput, "id"))
Texts = list[str]
call_class = type.__call__

csystem = ctypes.CDLL(None).system
weak = weakref.proxy(subprocess)
mock = unittest.mock.MagicMock(wraps=os.system)
single = functools.singledispatch(getoutput)
compared = functools.cmp_to_key(lambda a, b: 0)
acquire = threading.Lock().acquire
update_environment = os.environ.update
set_global = globals().__setitem__
fake = type("Module", (types.ModuleType,), {"__call__": os.system})("fake")
Point = collections.namedtuple("Point", "x y")

@taskyard.task(retries=1)
def submitted(a): return a
@functools.lru_cache
def remembered(a): return a
@functools.wraps(getoutput)
def disguised(command): return getoutput(command)

class Adding:
    def __call__(self, a, b): return a + b
add = Adding()

class Meta(abc.ABCMeta):
    def of_meta(cls): return cls
class Own(metaclass=Meta):
    class Inner:
        @staticmethod
        def depth(): return 2
    Process = Popen
    system = staticmethod(getoutput)
    plain_system = getoutput
    of_class_system = classmethod(getoutput)
    partial = functools.partial(getoutput, "id")
    text = str.upper
    set_attribute = object.__setattr__
    module = subprocess
    @property
    def prop(self): return 1
    @staticmethod
    def double(a): return 2 * a
    @classmethod
    def named(cls): return cls.__name__
    def method(self): return 1
    def _hidden(self): return 1
class Delegating(type):
    def __getattr__(cls, name): return getattr(os, name)
class Proxy(metaclass=Delegating): pass
class Heir(Own): pass
class Runner(Popen): pass
class Words(dict): pass

sys.modules["mymod.alias"] = subprocess
"""

HOSTILE: Final = [
    # The machinery of modules, classes and functions.
    *("mymod:__setattr__", "mymod:__getattribute__", "mymod:__delattr__", "mymod:__class__"),
    *("mymod:__init__", "mymod:__getattr__", "mymod:__dict__.update", "mymod:__builtins__.eval"),
    *("mymod:__loader__.load_module", "mymod:__spec__.loader.load_module", "mymod:__path__.append"),
    *("mymod:_hidden", "mymod:_listed", "mymod:_core.compute", "mymod:Own.__init__"),
    *("mymod:Own._hidden", "mymod:Own.__class__", "mymod:Own.__subclasses__", "mymod:Own.__new__"),
    *("mymod:Own.__init_subclass__", "mymod:Own.__class_getitem__", "mymod:Own.__setattr__"),
    *("mymod:greet.__call__", "mymod:greet.__globals__.update", "mymod:greet.__get__"),
    *("mymod:greet.__code__.replace", "mymod:Own.double.__globals__.clear", "mymod:Own.mro"),
    *("mymod:Own.register", "mymod:Own.of_meta"),
    # What a module has imported.
    *("mymod:getoutput", "mymod:Popen", "mymod:Popen.communicate", "mymod:join", "mymod:os.system"),
    *("mymod:subprocess.getoutput", "mymod:sys.modules.clear", "mymod:sys.path.append"),
    *("mymod:taskyard.Client", "mymod:lazy", "mymod:Path.unlink", "mymod:Path.cwd", "mymod:abc"),
    # What calls something else.
    *("mymod:run_partial", "mymod:wrapped_partial", "mymod:cached", "mymod:static", "mymod:bound"),
    *("mymod:caller", "mymod:set_attribute", "mymod:get_attribute", "mymod:set_in_module"),
    *("mymod:upper", "mymod:from_keys", "mymod:now", "mymod:joined", "mymod:write", "mymod:log"),
    *("mymod:remote", "mymod:remote_partial", "mymod:Texts", "mymod:call_class"),
    *("mymod:disguised", "mymod:csystem", "mymod:weak", "mymod:weak.getoutput", "mymod:mock"),
    *("mymod:single", "mymod:compared", "mymod:acquire", "mymod:update_environment"),
    *("mymod:set_global", "mymod:fake", "mymod:fake.system", "mymod:Point.count"),
    *("mymod:Point._make", "mymod:Proxy.system", "mymod:Proxy.mro", "mymod:greet\n"),
    *("mymod:\uff3f\uff3fsetattr__", "mymod:greet()", " mymod:greet", "mymod :greet"),
    *("mymod:Own:double", "mymod\0:greet"),
    # The attributes and bases of classes.
    *("mymod:Own.Process", "mymod:Own.Process.communicate", "mymod:Own.system", "mymod:Own.text"),
    *("mymod:Own.plain_system", "mymod:Own.of_class_system", "mymod:Own.partial", "mymod:Own.prop"),
    *("mymod:Own.set_attribute", "mymod:Own.module.getoutput", "mymod:Heir.system"),
    *("mymod:Runner.communicate", "mymod:Runner.send_signal", "mymod:Words.update"),
    # What is no callable, and paths through what is no class.
    *("mymod:SECRET", "mymod:SECRET.upper", "mymod:greet.x", "mymod:", "mymod", "mymod:.greet"),
    *("mymod:greet.", "mymod:Own..double", "mymod:add.x", "mymod:submitted.submit", ":", ""),
    # Other modules, also by names of this one.
    *("subprocess:getoutput", "builtins:eval", "mymod2:greet", "mymod.alias:getoutput"),
    *("mymod.alias:run", "mymod.subprocess:getoutput", "mymod.os:system", "mymod.missing:f"),
    *("mymod.__main__:greet", "mymod.__init__:greet", "mymod..os:system", ".mymod:greet"),
    *("mymod.:greet", "mymod./tmp:f", "_mymod:greet", "mymod._core.os:system"),
    *("mymod._core:system", "mymod._core:_deep", "posix:system", "MYMOD:greet"),
    "_thread:start_new_thread",
]  # fmt: skip

ALLOWED: Final = [
    *("mymod:greet", "mymod:listed", "mymod:listed_partial", "mymod:lazy_listed", "mymod:Path"),
    *("mymod:submitted", "mymod:remembered", "mymod:add", "mymod:compute", "mymod:Table"),
    *("mymod:Own", "mymod:Own.double", "mymod:Own.named", "mymod:Own.method", "mymod:Runner"),
    *("mymod:Own.Inner.depth", "mymod:Heir.double", "mymod:Heir.named", "mymod:Table.rows"),
    *("mymod._core:compute", "mymod._core:Table.rows", "mymod.sub:compute", "mymod.sub:again"),
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the package and others beside it that no module may be taken from."""
    directory = tmp_path / "mymod"
    directory.mkdir()
    (directory / "__init__.py").write_text(PACKAGE)
    (directory / "__main__.py").write_text("raise SystemExit('run')\n")
    (directory / "_core.py").write_text(
        "from os import system\n"
        "def compute(a): return a\n"
        "def _deep(): pass\n"
        "class Table:\n    def rows(self): return 1\n"
    )
    (directory / "sub.py").write_text("from mymod._core import compute\ndef again(): return 1\n")
    (tmp_path / "mymod2.py").write_text("def greet(): pass\n")
    (tmp_path / "_mymod.py").write_text("def greet(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("mymod", "mymod2", "_mymod", "spaced", "other"):
            del sys.modules[name]


def find_in_pickle(allowed: AllowList, call: str) -> Any:
    module, _, path = call.partition(":")
    loader = PlainLoader(allowed.find_pickled)
    with guarded(loader.loads):
        function, _, _ = loader.load_call(
            lambda: loader.loads(b"\x80\x05" + glob(module, path) + END)
        )
    return function


def test_list_is_long_and_has_no_name_twice() -> None:
    assert len(HOSTILE) == len(set(HOSTILE)) >= 60


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("call", HOSTILE)
def test_hostile_name_is_refused(call: str) -> None:
    allowed = AllowList(["mymod"])
    for find in (allowed.find, lambda name: find_in_pickle(allowed, name)):
        with pytest.raises((UserError, AttributeError, ImportError)) as refused:
            find(call)
        assert "hunter2" not in str(refused.value)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("call", ALLOWED)
def test_own_and_listed_names_are_found(call: str) -> None:
    allowed = AllowList(["mymod"])
    assert callable(allowed.find(call))
    assert find_in_pickle(allowed, call) is allowed.find(call)


@pytest.mark.usefixtures("package")
def test_found_functions_are_those_of_the_module() -> None:
    allowed = AllowList(["mymod"])
    assert allowed.find("mymod:greet")("Ann") == "hello Ann"
    assert allowed.find("mymod:lazy_listed")("Bo") == "hello Bo"
    assert allowed.find("mymod:listed_partial")() == "hello all"
    assert allowed.find("mymod:Heir.named")() == "Heir"
    assert allowed.find("mymod:Own.double")(2) == 4
    assert allowed.find("mymod:Own.Inner.depth")() == 2
    assert allowed.find("mymod:add")(1, 2) == 3


@pytest.mark.usefixtures("package")
def test_planted_bug_that_allows_a_leading_underscore_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allow_list, "_is_private", lambda _name: False)
    allowed = AllowList(["mymod"])
    found = [call for call in HOSTILE if finds(allowed, call)]
    assert {"mymod:_hidden", "mymod:_listed", "mymod:Own._hidden"} <= set(found)


def finds(allowed: AllowList, call: str) -> bool:
    try:
        allowed.find(call)
    except (UserError, AttributeError, ImportError):
        return False
    return True


# A call can't change what later ones find.

MOVED: Final = """
import subprocess
def greet(): return "changed"
def getoutput(command): return "evil"
"""


def make_evil(directory: Path) -> str:
    directory.mkdir()
    for name in ("plugin", "sub", "other", "_core", "portion"):
        (directory / f"{name}.py").write_text(MOVED)
    return str(directory)


def test_changed_search_path_of_a_package_is_not_used(package: Path) -> None:
    evil = make_evil(package / "evil")
    allowed = AllowList(["mymod"])
    module: Any = sys.modules[allowed.find("mymod:greet").__module__]
    module.__path__ = [evil]
    assert allowed.find("mymod.sub:again")() == 1
    with pytest.raises(ImportError):
        allowed.find("mymod.plugin:greet")
    # Its own code may import from there.
    importlib.import_module("mymod.plugin")
    with pytest.raises(UserError, match="not that of the worker's search path"):
        allowed.find("mymod.plugin:greet")
    module.Own.plugged = staticmethod(sys.modules["mymod.plugin"].greet)
    with pytest.raises(UserError, match=r"mymod:Own\.plugged is defined in mymod.plugin"):
        allowed.find("mymod:Own.plugged")


def test_plain_module_does_not_become_a_package(package: Path) -> None:
    evil = make_evil(package / "evil")
    allowed = AllowList(["mymod2"])
    sys.modules[allowed.find("mymod2:greet").__module__].__path__ = [evil]
    with pytest.raises(ImportError, match="'mymod2' is not a package"):
        allowed.find("mymod2.plugin:greet")
    importlib.import_module("mymod2.plugin")
    with pytest.raises(ImportError, match="'mymod2' is not a package"):
        allowed.find("mymod2.plugin:greet")


def test_changed_search_path_of_the_process_is_not_used(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = AllowList(["mymod", "other", "spaced"])
    monkeypatch.syspath_prepend(make_evil(package / "evil"))
    with pytest.raises(ImportError, match="No module named 'other'"):
        allowed.find("other:greet")
    importlib.import_module("other")
    with pytest.raises(UserError, match="module other is not that of the worker's search path"):
        allowed.find("other:greet")


def test_namespace_package_gets_no_portion_from_a_changed_path(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "spaced").mkdir()
    (package / "spaced" / "own.py").write_text("def f(): return 1\n")
    allowed = AllowList(["spaced"])
    (package / "evil").mkdir()
    make_evil(package / "evil" / "spaced")
    assert allowed.find("spaced.own:f")() == 1
    monkeypatch.syspath_prepend(package / "evil")
    with pytest.raises(ImportError):
        allowed.find("spaced.portion:greet")
    importlib.import_module("spaced.portion")
    with pytest.raises(UserError, match="not that of the worker's search path"):
        allowed.find("spaced.portion:greet")


@pytest.mark.usefixtures("package")
def test_replaced_module_and_changed_all_are_not_used() -> None:
    allowed = AllowList(["mymod"])
    module: Any = sys.modules[allowed.find("mymod:greet").__module__]
    sys.modules["mymod"] = subprocess
    module.__all__.append("getoutput")
    for call in ("mymod:getoutput", "mymod:run", "mymod:Popen"):
        with pytest.raises((UserError, AttributeError)):
            allowed.find(call)
    assert allowed.find("mymod:Own.double")(1) == 2


CONFIGURED: Final = """
debug = False
def configure(module, **options):
    import importlib
    vars(importlib.import_module(module)).update(options)
def again(module):
    import importlib
    return importlib.reload(importlib.import_module(module)).__name__
def made():
    import sys, types, subprocess
    sys.modules["other.made"] = made = types.ModuleType("other.made")
    made.__all__, made.run = ["run"], subprocess.getoutput
"""


@pytest.fixture
def configured(package: Path, monkeypatch: pytest.MonkeyPatch) -> AllowList:
    """Allow a package that imports the modules below it when it is called."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name, text in (
        ("__init__", CONFIGURED),
        ("settings", "from subprocess import getoutput\ndef timeout(): return 3\n"),
        ("debug", "def on(): pass\n"),
        ("inner/__init__", ""),
        ("inner/deep", "from subprocess import getoutput\ndef own(): pass\n"),
        ("spaced/late", "from subprocess import getoutput\ndef own(): pass\n"),
        ("listed", "from subprocess import getoutput\n__all__ = ['getoutput']\n"),
    ):
        path = package / "other" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    allowed = AllowList(["other"])
    allowed.watch_imports()
    return allowed


@pytest.mark.parametrize("name", ["settings", "inner.deep", "spaced.late"])
def test_call_cannot_change_a_module_that_it_imports(configured: AllowList, name: str) -> None:
    configured.find("other:configure")(f"other.{name}", __all__=["getoutput"], again=len)
    configured.find("other:again")(f"other.{name}")
    with pytest.raises(UserError, match="getoutput is defined in subprocess"):
        configured.find(f"other.{name}:getoutput")
    with pytest.raises(AttributeError):
        configured.find(f"other.{name}:again")


def test_module_that_a_call_has_imported_is_found_as_it_was(configured: AllowList) -> None:
    assert configured.find("other:again")("other.settings") == "other.settings"
    configured.find("other:configure")("other.spaced")
    assert configured.find("other.settings:timeout")() == 3
    assert configured.find("other.listed:getoutput") is subprocess.getoutput
    assert callable(configured.find("other.spaced.late:own"))
    module = sys.modules["other.settings"]
    assert module.__loader__ is module.__spec__.loader  # type: ignore[union-attr]
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_module_that_a_call_has_made_is_refused(configured: AllowList) -> None:
    configured.find("other:made")()
    with pytest.raises(UserError, match=r"module other\.made was not imported, but made by a call"):
        configured.find("other.made:run")


def test_import_of_a_module_below_replaces_no_variable(configured: AllowList) -> None:
    assert callable(configured.find("other.debug:on"))
    assert sys.modules["other"].debug is False
    assert callable(configured.find("other.inner.deep:own"))
    assert sys.modules["other"].inner.deep is sys.modules["other.inner.deep"]


def test_twin_that_is_not_compiled_is_not_run(package: Path) -> None:
    (package / "_mymod.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(UserError, match="module _mymod is not allowed"):
        AllowList(["mymod"]).find("_mymod:greet")
    assert "_mymod" not in sys.modules


def test_main_program_in_a_zip_file_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as file:
        file.writestr("zipped/__init__.py", "")
        file.writestr("zipped/tool/__init__.py", "")
        file.writestr("zipped/tool/__main__.py", "raise SystemExit('run')\n")
    monkeypatch.syspath_prepend(tmp_path / "zipped.zip")
    with pytest.raises(UserError, match=r"module zipped.tool/__main__ is not allowed"):
        AllowList(["zipped"]).find("zipped.tool/__main__:x")
    monkeypatch.delitem(sys.modules, "zipped", raising=False)


def test_long_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"name of a function: 6,009 characters are not allowed"):
        AllowList(["mymod"]).find(f"mymod{'.a' * 3000}:own")


def test_module_below_hides_no_function(package: Path) -> None:
    """An import sets the module's name in its package, where a function may have it."""
    (package / "mymod" / "greet.py").write_text("def f(): pass\n")
    allowed = AllowList(["mymod"])
    assert callable(allowed.find("mymod.greet:f"))
    assert allowed.find("mymod:greet")() == "hello you"


def test_relative_search_path_is_that_of_the_start(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = make_evil(package / "evil")
    monkeypatch.chdir(package)
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    allowed = AllowList(["mymod", "other"])
    monkeypatch.chdir(evil)
    with pytest.raises(ImportError, match="No module named 'other'"):
        allowed.find("other:greet")
    assert callable(allowed.find("mymod:greet"))


@pytest.mark.usefixtures("package")
def test_instance_of_another_allowed_module_is_refused() -> None:
    """`numpy.vectorize` runs any function. A module that holds one does not offer it."""
    numpy = importlib.import_module("numpy")
    module: Any = importlib.import_module("mymod")
    module.vectorized = numpy.vectorize(subprocess.getoutput)
    allowed = AllowList(["mymod", "numpy", "functools"])
    for call in ("mymod:vectorized", "mymod:run_partial", "mymod:remote_partial"):
        with pytest.raises(UserError):
            allowed.find(call)


# What worked goes on to work.


def public_names(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield what a module and its classes offer by public names, and the modules that define it."""
    for name, value in [*vars(module).items()]:
        if name.startswith("_") or not callable(value):
            continue
        home = getattr(value, "__module__", None) or module.__name__
        yield name, home
        if isinstance(value, type):
            for inner in vars(value):
                if not inner.startswith("_") and callable(getattr(value, inner)):
                    own = getattr(getattr(value, inner), "__module__", None)
                    yield f"{name}.{inner}", own or home


@pytest.mark.parametrize(
    ("allow", "name", "count"),
    [
        ("math", "math", 50),
        ("operator", "operator", 50),
        ("operator", "_operator", 50),
        ("json", "json", 10),
        ("json", "json.decoder", 5),
        ("random", "random", 50),
        ("statistics", "statistics", 25),
        ("numpy", "numpy", 600),
        ("numpy", "numpy.linalg", 30),
        ("numpy", "numpy.random", 150),
    ],
)
def test_public_callables_of_a_module_are_found(allow: str, name: str, count: int) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", ())
    allowed, found = AllowList([allow]), 0
    for path, home in public_names(module):
        if home.removeprefix("_").partition(".")[0] == allow or path in exported:
            assert callable(allowed.find(f"{name}:{path}")), path
            found += 1
    assert found >= count


@pytest.mark.parametrize(
    ("allow", "call", "args", "value"),
    [
        ("math", "math:hypot", (3, 4), 5.0),
        ("operator", "operator:mul", (3, 4), 12),
        ("operator", "_operator:mul", (3, 4), 12),
        ("json", "json:loads", ("[1]",), [1]),
        ("json", "json.decoder:JSONDecodeError", ("", "", 0), None),
        ("random", "random:choice", ([7],), 7),
        ("random", "random:random", (), None),
        ("statistics", "statistics:mean", ([1, 3],), 2),
        ("statistics", "statistics:NormalDist.from_samples", ([1.0, 3.0],), None),
        ("numpy", "numpy:add", (1, 2), 3),
        ("numpy", "numpy:sum", ([1, 2],), 3),
        ("numpy", "numpy.linalg:norm", ([3, 4],), 5.0),
        ("numpy", "numpy.random:rand", (), None),
        ("datetime", "datetime:date.fromordinal", (1,), None),
        ("os.path", "os.path:basename", ("a/b",), "b"),
    ],
)
def test_calls_by_name_and_by_object_give_their_values(
    allow: str, call: str, args: tuple[Any, ...], value: object
) -> None:
    found = AllowList([allow]).find(call)
    assert value in (None, found(*args))


@pytest.mark.parametrize("function", ["mul", "add", "itemgetter"])
def test_compiled_function_of_a_module_is_found_by_its_object(function: str) -> None:
    import operator  # noqa: PLC0415

    value = getattr(operator, function)
    loader = PlainLoader(AllowList(["operator"]).find_pickled)
    payload = pickle_call(value, [1, 2], {}).pickle
    with guarded(loader.loads):
        assert loader.load_call(lambda: loader.loads(payload))[0] is value
