"""Files, functions and classes stay small, what is public is documented, no file names a machine."""

import ast
import importlib
import inspect
import io
import pkgutil
import re
import subprocess
import textwrap
import tokenize
from pathlib import Path

import pytest

from support.source import ROOT, Module, modules, parse

FILE_LINES, FUNCTION_LINES, ARGUMENTS, ATTRIBUTES = 500, 60, 7, 15
#: Methods whose meaning nn.Module defines.
OVERRIDES = {"forward", "reset_parameters", "extra_repr"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
TRACKED_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".cfg", ".yml", ".yaml", ".sh", ""}
FORBIDDEN_TEXT = {
    "a path of a machine": r"(?<![\w.])/(?:work|root|home|Users|mnt/\w+)/[\w.-]+",
    "a package registry": r"index[-_]url[\s=\"':]+https?://(?!pypi\.org|download\.pytorch\.org)",
    "a host by number": r"https?://(?!127\.0\.0\.1|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+",
    "a private host": r"https?://[\w.-]*(?:artifactory|nexus|jfrog|\.internal|\.local|proxy)\b",
}


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return modules()


def functions(module: Module):
    return [node for node in ast.walk(module.tree) if isinstance(node, FUNCTIONS)]


def code_lines(module_text: str) -> set[int]:
    """Numbers of the lines that hold code: no blanks, no comments."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module_text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def docstring_lines(tree: ast.Module) -> set[int]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))]
    firsts = [body[0] for body in bodies if body and isinstance(body[0], ast.Expr)]
    texts = [node for node in firsts if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    return {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def long_functions(module: Module, text: str) -> list[str]:
    lines = code_lines(text) - docstring_lines(module.tree)
    sized = [(node, len([n for n in lines if node.lineno <= n <= node.end_lineno])) for node in functions(module)]
    return [f"{module.path}:{node.lineno} {node.name}: {size} lines" for node, size in sized if size > FUNCTION_LINES]


def argument_count(node: ast.FunctionDef) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def assigned(node: ast.AST) -> set[str]:
    """Names set on `self` below a node."""
    found = set()
    for item in ast.walk(node):
        stored = isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if stored and isinstance(item.value, ast.Name) and item.value.id == "self":
            found.add(item.attr)
    return found


def attribute_problems(module: Module) -> list[str]:
    """Classes with too many attributes, and attributes born outside __init__ or the class body."""
    problems = []
    for cls in [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]:
        everywhere = assigned(cls)
        born = {
            item.target.id for item in cls.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        setters = {item.name for item in cls.body if isinstance(item, FUNCTIONS) and item.decorator_list}
        for item in cls.body:
            if isinstance(item, FUNCTIONS) and item.name in ("__init__", "__new__", "__post_init__"):
                born |= assigned(item)
        late = sorted(everywhere - born - setters)
        if late:
            problems.append(f"{module.path}:{cls.lineno} {cls.name}: set outside __init__: {', '.join(late)}")
        if len(everywhere) > ATTRIBUTES:
            problems.append(f"{module.path}:{cls.lineno} {cls.name}: {len(everywhere)} attributes")
    return problems


def undocumented(module: Module) -> list[str]:
    """Public classes, functions and methods without a docstring; overrides of nn.Module need none."""
    problems = []

    def check(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if (
                isinstance(node, (*FUNCTIONS, ast.ClassDef))
                and not node.name.startswith("_")
                and node.name not in OVERRIDES
            ):
                overload = any("overload" in ast.unparse(d) or ".setter" in ast.unparse(d) for d in node.decorator_list)
                if ast.get_docstring(node) is None and not overload:
                    problems.append(f"{module.path}:{node.lineno} {prefix}{node.name}")
                if isinstance(node, ast.ClassDef):
                    check(node.body, f"{node.name}.")

    check(module.tree.body, "")
    return problems


def test_files_stay_readable(package):
    sizes = {str(module.path): len(module.path.read_text().splitlines()) for module in package}
    assert {path: size for path, size in sizes.items() if size > FILE_LINES} == {}


def test_functions_stay_short(package):
    assert [line for module in package for line in long_functions(module, module.path.read_text())] == []


def test_functions_take_few_arguments(package):
    # A command's options are its arguments, initialize has DeepSpeed's and plan has its command's; everything else takes
    # a dataclass.
    nodes = [(m, node) for m in package if m.room != "cli" for node in functions(m)]
    nodes = [(m, node) for m, node in nodes if m.name != "shardledger.api" or node.name not in ("initialize", "plan")]
    assert [
        f"{m.path}:{n.lineno} {n.name}: {argument_count(n)}" for m, n in nodes if argument_count(n) > ARGUMENTS
    ] == []


def test_classes_have_few_attributes_and_all_are_born_in_init(package):
    assert [line for module in package for line in attribute_problems(module)] == []


def test_what_is_public_is_documented(package):
    assert [line for module in package for line in undocumented(module)] == []


def test_every_module_says_what_it_is(package):
    assert [str(module.path) for module in package if ast.get_docstring(module.tree) is None] == []


def test_every_config_field_has_a_description():
    from pydantic import BaseModel

    import shardledger.config as room

    missing, models = [], set()
    for info in [None, *pkgutil.walk_packages(room.__path__, "shardledger.config.")]:
        module = room if info is None else importlib.import_module(info.name)
        models |= {item for _, item in inspect.getmembers(module, inspect.isclass) if issubclass(item, BaseModel)}
    models = {model for model in models if model.__module__.startswith("shardledger.config")}
    for model in models:
        missing += [f"{model.__name__}.{name}" for name, f in model.model_fields.items() if not f.description]
    assert models
    assert sorted(missing) == []


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if Path(line).suffix in TRACKED_SUFFIXES]


def text_problems(text: str) -> list[str]:
    return [f"{what}: {m.group(0)}" for what, pattern in FORBIDDEN_TEXT.items() for m in re.finditer(pattern, text)]


def test_no_tracked_file_names_a_machine_or_a_registry():
    found = {}
    for file in tracked_files():
        if file.is_file() and file != Path(__file__).resolve():
            problems = text_problems(file.read_text(errors="replace"))
            if problems:
                found[str(file.relative_to(ROOT))] = problems
    assert found == {}


def test_the_checks_notice():
    body = "\n".join(f"    x{i} = {i}  # {i}\n" for i in range(61))
    text = f'"""M."""\ndef long(a, b, c, d, e, f, g, *, h):\n    """D.\n\n    more."""\n{body}\n'
    module = parse("shardledger.x", Path("x.py"), text)
    assert long_functions(module, text) == ["x.py:2 long: 62 lines"]
    assert argument_count(functions(module)[0]) == 8
    text = textwrap.dedent('''
        class Crowd:
            """C."""
            def __init__(self):
                self.a, self.b = 1, 2
            def later(self):
                self.c = 3
    ''')
    module = parse("shardledger.x", Path("x.py"), text)
    assert attribute_problems(module) == ["x.py:2 Crowd: set outside __init__: c"]
    assert undocumented(module) == ["x.py:6 Crowd.later"]
    assert text_problems("see /home/somebody/x") == ["a path of a machine: /home/somebody"]
    assert text_problems("--index-url https://example.org/simple") != []
    assert text_problems("--index-url https://download.pytorch.org/whl/cpu, a/work/b, https://x.org/home/a") == []
