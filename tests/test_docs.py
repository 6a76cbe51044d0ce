"""The pages: they build, their tables are the source's, their commands are right, and the tutorial works."""

import dataclasses
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import BIN, MULTI, ROOT, SINGLE, Folder, environment, final, scalars

import ppo_atari
import ppo_atari_multigpu
from cleanrl_utils.config import RunArgs, parse

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TUTORIAL = (DOCS / "get-started" / "change-a-script.md").read_text()


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages, by what `make docs` runs."""
    folder = tmp_path_factory.mktemp("site")
    argv = [str(BIN / "mkdocs"), "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site):
    pages = [str(page.relative_to(DOCS)) for page in PAGES]
    assert len(pages) >= 10
    index = (site / "index.html").read_text()
    for page in pages:
        html = page.replace(".md", ".html")
        assert (site / html).exists() and f'href="{html}"' in index, page
    assert not (site / "hooks.py").exists()
    results = (site / "results" / "index.html").read_text()
    assert 'href="results/index.html"' in index and (site / "results" / "Pong.png").exists() and "Pong.png" in results


def test_a_visit_needs_no_network(site):
    for page in site.rglob("*.html"):
        loads = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', page.read_text())
        loads += re.findall(r'<link[^>]* rel="(?:stylesheet|icon|preload|preconnect)"[^>]*>', page.read_text())
        assert loads and not [load for load in loads if "//" in load], page


def test_pictures_are_there_and_small():
    link = re.compile(r"!\[[^\]]*\]\(([^)]*\.png)\)")
    used = {(page.parent / name).resolve() for page in PAGES for name in link.findall(page.read_text())}
    assert set(DOCS.rglob("*.png")) <= used and all(picture.stat().st_size < 80_000 for picture in used)


@pytest.mark.parametrize(
    "path, args_class", [("cleanrl_utils/config.py", RunArgs), (MULTI, ppo_atari_multigpu.Args)], ids=["run", "script"]
)
def test_the_flags_of_the_page_are_the_dataclass(hooks, site, path, args_class):
    rows = hooks.flags(path, args_class.__name__)
    own = [f for f in dataclasses.fields(args_class) if f.name in args_class.__annotations__]
    assert len(rows) == len(own) >= 15
    html = (site / "flags.html").read_text()
    for (names, _, default, text), field in zip(rows, own, strict=True):
        flag = field.name.replace("_", "-")
        assert names.startswith(f"`--{flag}`{{") and len(text) > 10
        assert f'<code class="flag">--{flag}</code>' in html
        known = {"None": "not set", "()": "none", "True": "on", "False": "off"}
        assert default == known.get(str(field.default), f"`{field.default}`")
    assert f"<!-- flags: {path} {args_class.__name__} -->" in (DOCS / "flags.md").read_text()


def test_which_flags_the_single_script_lacks():
    missing = {f.name for f in dataclasses.fields(ppo_atari_multigpu.Args)} - {
        f.name for f in dataclasses.fields(ppo_atari.Args)
    }
    assert missing == {"total_num_envs", "backend", "device_ids"}
    assert "has all of them but `--total-num-envs`, `--backend` and `--device-ids`" in (DOCS / "flags.md").read_text()


def test_the_deviations_are_the_docstring(site):
    html = (site / "deviations.html").read_text()
    items = re.findall(r"^- (\S+ \S+)", ppo_atari.__doc__, re.M)
    assert len(items) >= 9 and all(f"<li>{item}" in html for item in items)


def test_the_metrics_of_the_page_are_those_of_a_run(tmp_path):
    folder = Folder(tmp_path)
    flags = ["--num-envs", 1, "--num-steps", 256, "--total-timesteps", 256, "--update-epochs", 1, "--run-name", "r"]
    assert run_script(folder, SINGLE, *flags) == 0
    everywhere, wandb_only = (DOCS / "metrics.md").read_text().split("## In Weights & Biases only")
    assert set(re.findall(r"^\| `(\w+/\w+)`", everywhere, re.M)) == set(scalars(str(tmp_path / "runs" / "r")))
    assert re.findall(r"^\| `(\S+)`", wandb_only, re.M) == ["charts/mean_return", "global_step", "videos"]


# ---- commands --------------------------------------------------------------------------------------------------------
def command_lines(markdown):
    """The lines of the bash blocks, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", markdown, re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


TRAINING = [
    pytest.param(line, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, line in enumerate(command_lines(page.read_text()))
    if re.search(r"^(?:\w+=\S+ )*(?:python|torchrun|python -m cleanrl_utils\.launch)(?: -\S+)* \S*ppo_atari", line)
]


@pytest.mark.parametrize("line", TRAINING)
def test_the_flags_of_the_commands_exist(line):
    """The tutorial's commands run below and the README's in test_readme; these are spelt right and fit together."""
    from torch.distributed.run import get_args_parser

    words = [word for word in shlex.split(line) if "=" not in word or word.startswith("-")]
    (script,) = [i for i, word in enumerate(words) if word in (SINGLE, MULTI)]
    args = parse((ppo_atari if words[script] == SINGLE else ppo_atari_multigpu).Args, words[script + 1 :])
    assert not args.resume or args.run_name
    launcher = [word for word in words[:script] if word not in ("python", "torchrun", "-m", "cleanrl_utils.launch")]
    parsed, unknown = get_args_parser().parse_known_args([*launcher, words[script]])
    assert unknown == [] and parsed.training_script == words[script]


def test_commands_of_a_known_kind():
    """A command of a new kind in these pages needs a test here."""
    assert len(TRAINING) >= 12
    mine = ("index", "installation", "first-run", "change-a-script", "distributed", "resume", "wandb", "contributing")
    lines = [line for page in PAGES if page.stem in mine for line in command_lines(page.read_text())]
    shell = ("make ", "pip install ", "source ", "tensorboard ", "mkdir ", "cp ", "cd ", "export ", "wandb sync ")
    scripts = (
        "python ppo_",
        "python dual_clip.py ",
        "SIZES=",
        "python -m cleanrl_utils.launch ",
        "torchrun ",
        "WANDB_MODE=",
    )
    assert [line for line in lines if not line.startswith((*shell, *scripts, 'python -c "'))] == []
    targets = {target for line in lines for target in re.findall(r"^make ([\w-]+)", line)}
    assert targets and all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
    for line in lines:
        if line.startswith("python -c"):
            exec(shlex.split(line)[2], {})


# ---- the tutorial ----------------------------------------------------------------------------------------------------
def run_script(folder, script, *flags):
    """A script's `__main__` in this process and the folder: its exit code."""
    path = str(folder.path / script) if (folder.path / script).exists() else str(ROOT / script)

    def main():
        sys.argv = [path, *map(str, flags)]
        runpy.run_path(path, run_name="__main__")

    return folder.here(main)


def apply(diff, file):
    """A diff block of the page: its old lines must be in the file, once."""
    lines = diff.splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line[0] in kept) + "\n" for kept in (" -", " +"))
    source = file.read_text()
    assert source.count(old) == 1 and old != new, f"the place of this edit has changed:\n{diff}"
    file.write_text(source.replace(old, new))


def test_copy_a_script_and_change_it(tmp_path, monkeypatch, capsys):
    """Do what the page says, in its order."""
    shutil.copy(ROOT / MULTI, tmp_path)
    folder, sizes, sums, edits = Folder(tmp_path), "", {}, 0
    for language, block in re.findall(r"^```(bash|diff)\n(.*?)^```", TUTORIAL, re.M | re.S):
        if language == "diff":
            apply(block, folder.path / "dual_clip.py")
            edits += 1
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line.replace("$SIZES", sizes))
            if program.startswith("SIZES="):
                sizes = program.removeprefix("SIZES=")
            elif program == "mkdir":
                (folder.path / words[0]).mkdir()
            elif program == "cp":
                shutil.copy(folder.path / words[0], folder.path / words[1])
            elif program == "cd":
                folder = Folder(folder.path / words[0])
            elif program == "python":
                assert run_script(folder, *words) == 0
                output = capsys.readouterr().out
                if "--help" in words:
                    assert "--dual-clip" in output and "where the advantage is negative" in output
                else:
                    sums[words[words.index("--run-name") + 1]] = final(output)
            else:
                assert program == "torchrun"
                done = folder.run([str(BIN / "torchrun"), *words])
                sums[words[words.index("--run-name") + 1]] = final(done.stdout)
    assert edits == 3 and set(sums) == {"before", "same", "other", "two", "norm"}
    assert {steps for steps, _ in sums.values()} == {256}
    values = {name: value for name, (_, value) in sums.items()}
    assert values["same"] == values["before"], "a bound that is never reached changes nothing"
    assert abs(values["other"] - values["before"]) > 1e-3
    assert abs(values["two"] - values["other"]) < 1e-3, "the number of processes must not matter"
    assert abs(values["norm"] - values["before"]) > 1
    assert run_script(folder, "dual_clip.py", "--dual-clip", 0) == 2
    assert "error: --dual-clip 0.0: must be above 0" in capsys.readouterr().err
