"""What the pages take from the source when they are built, so that it cannot drift.

In a page, a line of its own:

    <!-- flags: cleanrl_utils/config.py RunArgs -->    a table of the dataclass's fields
    <!-- docstring: ppo_atari.py -->                   the list in the module's docstring

The navigation's section Tools gets the pages that nothing else in it names. results/ becomes a part of the pages, which
link to it where it is, beside docs/.
"""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent


def flags(path: str, class_name: str) -> list[tuple[str, str, str, str]]:
    """(flag with its other names, values, default, explanation) of each field that a dataclass itself defines."""
    module = ast.parse((ROOT / path).read_text())
    (body,) = (node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    rows = []
    for i, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            following = body[i + 1] if i + 1 < len(body) else None
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                raise ValueError(f"{path}: {class_name}.{node.target.id} has no docstring")
            text = re.sub(r"([*_<])", r"\\\1", " ".join(str(following.value.value).split()))
            kind, default = ast.unparse(node.annotation), ast.unparse(node.value) if node.value else ""
            aliases = re.findall(r"aliases=\[(.*?)\]", kind)
            names = [node.target.id, *(ast.literal_eval(f"[{aliases[0]}]") if aliases else [])]
            rows.append((_names(names, kind, default), _values(kind), _default(kind, default), text))
    return rows


def _names(names: list[str], kind: str, default: str) -> str:
    dashed = [name if name.startswith("-") else "--" + name.replace("_", "-") for name in names]
    if kind == "bool" and default == "True":
        dashed += [f"--no-{name[2:]}" for name in dashed]
    return ", ".join(f"`{name}`{{.flag}}" for name in dashed)  # a class, so that no line breaks in it


def _values(kind: str) -> str:
    if choices := re.search(r"Literal\[(.*?)\]", kind):
        return " or ".join(f"`{choice}`" for choice in ast.literal_eval(f"[{choices[1]}]"))
    rules = {"Positive": "above 0", "NonNegative": "0 or above", "Fraction": "between 0 and 1"}
    rule = next((f", {says}" for name, says in rules.items() if f"{name}[" in kind), "")
    if kind == "bool":
        return "none"
    number = re.search(r"\b(int|float|str|Path)\b", kind)
    names = {"int": "integer", "float": "number", "str": "text", "Path": "path"}
    several = "several: " if kind.startswith(("tuple", "list")) or "[tuple" in kind else ""
    return several + (names[number[1]] if number else f"`{kind}`") + rule


def _default(kind: str, default: str) -> str:
    if kind == "bool":
        return "on" if default == "True" else "off"
    return {"None": "not set", "()": "none", "": "required"}.get(default, f"`{default.strip(chr(39))}`")


def flag_table(path: str, class_name: str) -> str:
    rows = ["| flag | values | default | what it does |", "|---|---|---|---|"]
    for row in flags(path, class_name):
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |")
    return "\n".join(rows)


def docstring_list(path: str) -> str:
    """The items of the list in a module's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    items = re.findall(r"^- .*(?:\n  .*)*", text, re.M)
    if not items:
        raise ValueError(f"{path}: no list in the docstring")
    return "\n".join(items)


def on_config(config: dict) -> dict:
    """MkDocs calls it first. A page that the navigation does not name, one of a tool, is added to its section Tools."""
    named = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    tools = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in named)
    for section in config["nav"]:
        if "Tools" in section:
            section["Tools"] += tools
    return config


def on_files(files, config):
    """MkDocs calls it second."""
    for path in [ROOT / "results" / "README.md", *(ROOT / "results").rglob("*.png")]:
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs calls it for every page."""
    markdown = re.sub(r"(\]\((?:\.\./)*)\.\./results/", r"\1results/", markdown)
    markdown = re.sub(r"^<!-- flags: (\S+) (\S+) -->$", lambda m: flag_table(m[1], m[2]), markdown, flags=re.M)
    return re.sub(r"^<!-- docstring: (\S+) -->$", lambda m: docstring_list(m[1]), markdown, flags=re.M)
