"""The rows of the frameworks fit the frameworks that are installed: functions, variables, arguments and options are where they say.

The sources are parsed, never imported. A row that a release broke is named; a framework that is not installed is skipped by name.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Set
from importlib import metadata
from pathlib import Path

import pytest

from nanscope.causes import CAUSES
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.rows import Framework, LossSite, roles
from nanscope.frameworks.table import FRAMEWORKS, recognise, site_in
from nanscope.roles import Role

NEEDED = {Role.LOG_PROBS, Role.ADVANTAGES, Role.MASK}  # every loss has these, whatever else its family calls by name
BY_NAME = {framework.name: framework for framework in FRAMEWORKS}


def root_of(framework: Framework) -> Path | None:
    """Return the folder that holds a framework's package, None if it is not installed."""
    if not framework.sites:
        return None
    package = framework.sites[0].file.split("/")[0]
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).parent if places and (Path(places[0]).parent / framework.sites[0].file).exists() else None


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def words_of(node: ast.AST) -> set[str]:
    """Names, arguments, keywords, attributes and texts in a piece of source."""
    found: set[str] = set()
    for part in ast.walk(node):
        found |= {getattr(part, field) for field in ("id", "arg", "attr") if isinstance(getattr(part, field, None), str)}
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
    return found


def broken_site(site: LossSite, root: Path, elsewhere: Set[str] = frozenset()) -> list[str]:
    """Return what of a row is not in the source below `root`, in words. elsewhere: names that another function of the same row has."""
    where = f"{site.file}: {site.function}"
    path = root / site.file
    if not path.exists():
        return [f"{where}: the file is gone"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = dict(functions(tree)).get(site.function)
    if node is None:
        return [f"{where}: the function is gone"]
    words = words_of(node)
    problems = [f"{where}: no variable {name!r} ({role})" for name, role in site.roles if name not in words | elsewhere]
    for role in {role for _, role in site.roles} & NEEDED if site.key is not None else ():
        if not words & {name for name, known in site.roles if known is role}:
            problems.append(f"{where}: nothing here is {role}")
    paths = [*site.configs, *(path for _, path in site.settings)]
    problems += [f"{where}: {path!r} leads nowhere" for path in paths if not set(re.split(r"[.=?]+", path)[:1]) <= words]
    if site.kernel is not None:
        arguments = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        own = [site.kernel.hidden, site.kernel.ids, site.kernel.weight, site.kernel.bias, site.kernel.temperature]
        own += [name for name, _ in site.kernel.tensors]
        problems += [f"{where}: no argument {name!r}" for name in own if name and name not in arguments]
    return problems


def broken_options(framework: Framework, root: Path) -> list[str]:
    """Return the options that the remedies name and the framework does not declare."""
    texts = [path.read_text(encoding="utf-8") for name in framework.options if (path := root / name).exists()]
    problems = []
    for remedy in framework.remedies:
        if remedy.setting is not None:
            option = re.split(r"[= ]", remedy.setting)[0]
            word = option.removeprefix("--").rsplit(".", 1)[-1]
            if not any(re.search(rf"(?<!\w){re.escape(word)}(?![\w-])", text) for text in texts):
                problems.append(f"{framework.name}: no option {option!r} in {', '.join(framework.options)}")
    return problems


def broken(framework: Framework, root: Path) -> list[str]:
    """Return all rows of a framework that its source does not fit. Functions of one family share a row's names: each has some of them."""
    problems = []
    for site in framework.sites:
        family = {other.function for other in framework.sites if other.roles == site.roles and other is not site}
        path = root / site.file
        nodes = dict(functions(ast.parse(path.read_text(encoding="utf-8")))) if path.exists() and family else {}
        elsewhere = {word for name in family & set(nodes) for word in words_of(nodes[name])}
        problems += broken_site(site, root, elsewhere)
    return problems + broken_options(framework, root)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_rows_fit_the_installed_release(name: str) -> None:
    """Every function, variable, argument and option of a row exists in the framework that is installed here."""
    framework = BY_NAME[name]
    root = root_of(framework)
    if root is None:
        pytest.skip(f"{name} is not installed")
    problems = broken(framework, root)
    version = next((metadata.version(p) for p in (framework.package, framework.package.replace("_", "-")) if _has(p)), "?")
    assert not problems, f"{name} {version} does not fit the rows checked against {framework.version}:\n" + "\n".join(problems)


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


SOURCE = """
class Trainer:
    def _compute_loss(self, model, inputs):
        per_token_logps = model(inputs)
        old = inputs["old_logps"]
        scale = self.args.beta
        def inner(x):
            return x
        return inner(per_token_logps - old) * scale
"""
GOOD = LossSite(
    "fw/trainer.py", "Trainer._compute_loss", roles(log_probs="per_token_logps", old_log_probs="old old_logps"), None, ("self.args",)
)
PLANTED = {
    "no variable 'ref' (ref_log_probs)": LossSite("fw/trainer.py", "Trainer._compute_loss", roles(ref_log_probs="ref")),
    "the function is gone": LossSite("fw/trainer.py", "Trainer.compute_loss", ()),
    "the file is gone": LossSite("fw/loss.py", "Trainer._compute_loss", ()),
    "'config' leads nowhere": LossSite("fw/trainer.py", "Trainer._compute_loss", (), None, ("config",)),
    "'kwargs.beta' leads nowhere": LossSite("fw/trainer.py", "Trainer._compute_loss", (), None, (), (("beta", "kwargs.beta"),)),
}  # fmt: skip


@pytest.mark.parametrize("complaint", PLANTED)
def test_a_row_that_a_release_broke_is_named(tmp_path: Path, complaint: str) -> None:
    """What a release renames or removes is told with file, function and name; what still fits is not."""
    (tmp_path / "fw").mkdir()
    (tmp_path / "fw" / "trainer.py").write_text(SOURCE, encoding="utf-8")
    assert broken_site(GOOD, tmp_path) == []
    assert broken_site(LossSite("fw/trainer.py", "Trainer._compute_loss.<locals>.inner", roles(log_ratio="x")), tmp_path) == []
    problems = broken_site(PLANTED[complaint], tmp_path)
    assert len(problems) == 1 and complaint in problems[0] and PLANTED[complaint].function in problems[0]


def test_an_option_that_is_gone_is_named(tmp_path: Path) -> None:
    """A remedy may not send people to an option that their release does not have."""
    trl = BY_NAME["TRL"]
    (tmp_path / "trl" / "trainer").mkdir(parents=True)
    named = {re.split(r"[= ]", remedy.setting)[0] for remedy in trl.remedies if remedy.setting}
    (tmp_path / trl.options[0]).write_text("\n".join(f"{name}: float" for name in named if name != "beta"), encoding="utf-8")
    assert [problem.split(" in ")[0] for problem in broken_options(trl, tmp_path)] == ["TRL: no option 'beta'"]


@pytest.mark.parametrize("name", BY_NAME)
def test_rows_are_sound_in_themselves(name: str) -> None:
    """Keys are known to `framework_loss`, settings are settings of their key, causes are causes, and no name has two roles."""
    framework = BY_NAME[name]
    assert (framework.sites or framework.losses) and framework.version
    for site in framework.sites:
        assert len({word for word, _ in site.roles}) == len(site.roles), site.function
        assert site_in(f"/somewhere/{site.file}", site.function) is site
        assert site_in(f"/somewhere/my{site.file}", site.function) is None, "a file of another name is another file"
        assert recognise([f"/somewhere/{site.file}"]) is framework or not any(part in f"/somewhere/{site.file}" for part in framework.files)
        if site.key is None:
            continue
        keys = [key for key in LOSSES if re.fullmatch(re.sub(r"\{\w+\}", r"\\w+", site.key), key)]
        assert keys, site.key
        names = {name for key in keys for name in (*LOSSES[key].names(), *dict(LOSSES[key].fixed))}
        assert {name for name, _ in site.settings} <= names, (site.function, {name for name, _ in site.settings} - names)
        assert {name for name, _ in site.fixed} <= names, site.function
    assert {cause for remedy in framework.remedies for cause in remedy.causes} <= {str(cause) for cause in CAUSES}


def test_names_in_a_site_function_have_the_role_of_the_row() -> None:
    """A short name that means nothing elsewhere means what the row says, in its function only."""
    site = site_in("/site-packages/unsloth_zoo/rl_replacements.py", "grpo_compute_loss")
    assert site is not None and site.role("new") is Role.LOG_PROBS and site.role("loss") is Role.LOSS and site.role("nothing") is None
    assert site_in("C:\\site-packages\\unsloth_zoo\\rl_replacements.py", "grpo_compute_loss") is site
    assert site_in("/site-packages/unsloth_zoo/rl_replacements.py", "another") is None
