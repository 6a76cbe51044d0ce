"""The image has all that the scripts import. tests/test_cloud_image.py builds it."""

import ast
import re

from conftest import MULTI, ROOT, SINGLE

PACKAGE = "cleanrl_utils"


def project_imports(path, seen):
    """Add to `seen` the project's files that a file imports, their imports too."""
    if path in seen:
        return
    seen.add(path)
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                base = ROOT.joinpath(*parts[:end])
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    if file.is_file():
                        project_imports(file, seen)


def ignored(name, rules):
    """Whether .dockerignore keeps a file out of the build: the last rule that names it or a folder above decides."""
    out = False
    for rule in rules:
        pattern = re.escape(rule.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(/.*)?", name):
            out = not rule.startswith("!")
    return out


def copied(dockerfile):
    """The files and folders that COPY lines bring into the image."""
    lines = re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def missing(dockerfile, dockerignore):
    """The files that the image needs and does not have: what the scripts import, and all of the package."""
    needed = set()
    for script in (SINGLE, MULTI):
        project_imports(ROOT / script, needed)
    needed |= set((ROOT / PACKAGE).rglob("*.py"))
    sources, rules = copied(dockerfile), [line for line in dockerignore.split("\n") if line]
    names = [path.relative_to(ROOT).as_posix() for path in needed]
    reached = {name for name in names if any(name == s or name.startswith(f"{s}/") for s in sources)}
    return sorted(name for name in names if name not in reached or ignored(name, rules))


def test_the_image_has_every_project_file_that_the_scripts_import():
    dockerfile, dockerignore = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text()
    assert missing(dockerfile, dockerignore) == []
    sources = [*copied(dockerfile), f"{PACKAGE}/launch.py"]
    rules = dockerignore.split()
    assert not [source for source in sources if ignored(source, rules)], "COPY of what .dockerignore keeps out fails"
    assert ignored("runs/first/checkpoint.pt", rules) and ignored(f"{PACKAGE}/__pycache__/launch.pyc", rules)
    assert ignored(".git/config", rules) and ignored("wandb/key", rules)


def test_a_file_that_is_left_out_is_noticed():
    dockerfile, dockerignore = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text()
    assert missing(dockerfile.replace(f" {MULTI}", ""), dockerignore) == [MULTI]
    assert f"{PACKAGE}/atari.py" in missing(dockerfile.replace(f"COPY {PACKAGE} {PACKAGE}\n", ""), dockerignore)
    subpackages = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    top_only = dockerignore.replace(f"!{PACKAGE}\n", f"!{PACKAGE}/*.py\n")
    assert {name.split("/")[1] for name in missing(dockerfile, top_only)} == subpackages
