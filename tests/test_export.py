"""An exported agent plays like its checkpoint, its card has what the hub shows, and an upload is the folder."""

import base64
import http.server
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from conftest import PATIENCE, ROOT, SINGLE, environment
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from test_evaluate import BREAKOUT, FIRE, error, here, played, policy, save  # noqa: F401  (here: a fixture)

from cleanrl_utils import evaluate, export
from cleanrl_utils.config import Fault


def exported(*argv):
    assert export.main([str(word) for word in argv]) == 0


def refused(capsys, *argv, code=2):
    capsys.readouterr()
    assert export.main([str(word) for word in argv]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_an_exported_agent_is_the_checkpoints(capsys):
    save("runs/first")
    exported("runs/first")
    weights = load_file("exports/first/model.safetensors")
    state = evaluate.load_agent("runs/first")
    assert weights.keys() == state.weights.keys()
    assert all(torch.equal(weights[name], state.weights[name]) for name in weights)
    there = evaluate.load_agent("exports/first")
    assert (there.config, there.command, there.global_step) == (state.config, state.command, state.global_step)
    first, again = (played(agent, "--games", 2) for agent in ("runs/first", "exports/first"))
    assert first == again
    with open("exports/first/ppo_atari.py") as file:  # found in this project
        assert file.read() == (ROOT / SINGLE).read_text()
    exported("exports/first", "--out", "exports/first")  # with the evaluation, now
    assert ModelCard.load("exports/first/README.md").data.eval_results


def test_the_model_card(capsys):
    save("runs/first", weights=policy(BREAKOUT, {FIRE: 1.0}))
    result = played("runs/first", "--games", 2, "--capture-video")
    exported("runs/first")
    card = ModelCard.load("exports/first/README.md")
    (score,) = card.data.eval_results
    assert score.dataset_name == BREAKOUT and score.metric_type == "mean_reward"
    assert score.metric_value == f"{result['mean']:.2f} +/- {result['std']:.2f}"
    assert {"reinforcement-learning", BREAKOUT} <= set(card.data.tags) and card.data.model_name == "PPO"
    assert f"python ppo_atari.py --env-id {BREAKOUT}\n" in card.text and "| seed | 1 |" in card.text
    assert "python -m cleanrl_utils.evaluate first --script first/ppo_atari.py" in card.text
    for name, source in (("evaluation.json", "evaluation.json"), ("replay.mp4", "evaluation-median.mp4")):
        with open(f"exports/first/{name}", "rb") as ours, open(f"runs/first/{source}", "rb") as theirs:
            assert ours.read() == theirs.read()


def test_an_evaluation_of_another_step_stays_behind(capsys):
    save("runs/first", weights=policy(BREAKOUT, {FIRE: 1.0}), script="elsewhere.py")
    played("runs/first", "--games", 1, "--script", ROOT / SINGLE)
    save("runs/first", iteration=2, script="elsewhere.py")
    exported("runs/first")
    assert "evaluation.json is of step 1000, the checkpoint of 2000" in capsys.readouterr().err
    card = ModelCard.load("exports/first/README.md")
    assert card.data.eval_results is None and "--script" not in card.text
    assert sorted(export.os.listdir("exports/first")) == ["README.md", "config.json", "model.safetensors"]


def test_an_export_has_nothing_of_the_agent_before_it(capsys):
    save("runs/first", weights=policy(BREAKOUT, {FIRE: 1.0}))
    played("runs/first", "--games", 1)
    exported("runs/first", "--out", "out")
    assert "evaluation.json" in export.os.listdir("out")
    save("runs/second")
    exported("runs/second", "--out", "out")
    assert "evaluation.json" not in export.os.listdir("out")
    assert ModelCard.load("out/README.md").data.eval_results is None


def test_odd_names_scripts_weights_and_evaluations(tmp_path, capsys):
    weights = policy(BREAKOUT)
    weights["tied"] = weights["critic.bias"]  # a changed script's; the format has no shared memory
    save("runs/a b", weights=weights)
    (tmp_path / "mine.py").write_bytes("# -*- coding: latin-1 -*-\n# größe\n".encode("latin-1"))
    (tmp_path / "runs/a b/evaluation.json").write_text(json.dumps({"global_step": 1000, "env_id": BREAKOUT, "mean": 1}))
    exported("runs/a b", "--script", "mine.py")
    assert "warning: skipped runs/a b/evaluation.json: KeyError: 'std'" in capsys.readouterr().err.replace(
        f"{tmp_path}/", ""
    )
    assert (tmp_path / "exports/a b/ppo_atari.py").read_bytes() == (tmp_path / "mine.py").read_bytes()
    assert "tied" in load_file("exports/a b/model.safetensors")
    card = (tmp_path / "exports/a b/README.md").read_text()
    assert "python -m cleanrl_utils.evaluate 'a b' --script 'a b/ppo_atari.py'\n" in card
    saved = evaluate.load_agent("exports/a b")
    saved.config["exp_name"] = "x|y"
    assert "| exp_name | x\\|y |\n" in export.model_card(saved, None, "x", None)


def test_a_repository_that_is_there_is_asked_whose_it_is_and_whether_it_is_private(monkeypatch):
    done = {}

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, repo, **_):
            return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{repo}")

        def model_info(self, repo):
            return SimpleNamespace(private=False)

        def upload_folder(self, **given):
            done.update(given)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(Fault, match="--private: pong is a public repository; nothing was uploaded"):
        export.push("folder", "pong", private=True)
    assert done == {}
    export.push("folder", "pong", private=False)
    assert done["repo_id"] == "me/pong"


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ["../elsewhere/ppo_atari.py"]},  # would be written outside of --out
        {"command": []},
        {"command": "ppo_atari.py"},
        {"config": {}},
        {"machine": {}},
        {"global_step": "many"},
    ],
)
def test_an_agent_from_elsewhere_that_tells_nonsense(wrong, capsys):
    save("runs/first")
    exported("runs/first")
    with open("exports/first/config.json") as file:
        told = json.load(file)
    with open("exports/first/config.json", "w") as file:
        json.dump({**told, **wrong}, file)
    assert "exports/first: not the command, config, machine and step" in refused(
        capsys, "exports/first", "--out", "out"
    )
    assert not export.os.path.exists("out") and not export.os.path.exists("elsewhere")


def test_the_command_of_several_processes():
    saved = evaluate.load_agent(save("runs/first"))
    saved.machine["processes"] = 2
    expected = f"torchrun --standalone --nnodes=1 --nproc_per_node=2 ppo_atari.py --env-id {BREAKOUT}"
    assert export.training_command(saved) == expected


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; it keeps what it was sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        path, answer, code = self.path.split("?")[0], {}, 200
        if self.server.refuses:
            code, answer = 403, {"error": "not with this token"}
        elif path == "/api/repos/create":
            answer = {"url": f"{self.server.url}/me/pong"}
        elif path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": f, "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in path:
            answer = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.url}/me/pong/commit/0"}
        answer = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self):
        answer = json.dumps({"id": "me/pong", "private": True}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.requests, server.refuses = f"http://127.0.0.1:{server.server_port}", [], False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_upload(hub, tmp_path):
    """By the real client, to a stand-in for the hub: what arrives is what is in the folder."""
    save("runs/first", weights=policy(BREAKOUT, {FIRE: 1.0}))
    argv = [sys.executable, "-m", "cleanrl_utils.export", "runs/first", "--push-to-hub", "me/pong", "--private"]
    env = environment(HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret", HF_HOME=str(tmp_path / "hf"), PYTHONPATH=str(ROOT))
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert all(authorization == "Bearer hf_secret" for _, authorization, _ in hub.requests)
    assert json.loads(hub.requests[0][2])["name"] == "pong" and "private" in hub.requests[0][2].decode()
    assert done.returncode == 0, done.stderr
    assert f"uploaded to {hub.url}/me/pong" in done.stdout
    (commit,) = [body for path, _, body in hub.requests if "/api/models/me/pong/commit/main" in path]
    lines = [json.loads(line) for line in commit.decode().splitlines()]
    sent = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
    assert set(sent) == {"README.md", "config.json", "model.safetensors", "ppo_atari.py"}
    for name, content in sent.items():
        assert base64.b64decode(content) == (tmp_path / "exports" / "first" / name).read_bytes()
    assert "hf download me/pong --local-dir pong" in base64.b64decode(sent["README.md"]).decode()


def test_an_upload_that_is_refused_is_one_line(hub, monkeypatch, capsys):
    save("runs/first")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)  # of HF_ENDPOINT, read at its import
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.refuses = True
    line = refused(capsys, "runs/first", "--push-to-hub", "me/pong", code=1)
    assert line.startswith("error: --push-to-hub me/pong: ") and "403" in line


@pytest.mark.parametrize(
    "argv, says",
    [
        (["nowhere"], "nowhere: does not exist"),
        (["runs/first", "--private"], "--private: needs --push-to-hub"),
        (["runs/first", "--push-to-hub", "a/b/c"], "--push-to-hub a/b/c: Repo id must"),
        (["runs/first", "--script", "nowhere.py"], "--script nowhere.py: does not exist"),
        (["runs/first", "--out", "runs/first"], "--out runs/first: exists and is not an exported agent"),
        (["runs/first", "--out", "runs/first/checkpoint-00000001.pt"], "is not an exported agent"),
    ],
)
def test_bad_usage_is_one_line(argv, says, tmp_path, capsys):
    save("runs/first")
    before = sorted(tmp_path.rglob("*"))
    assert says in refused(capsys, *argv)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_export_is_one_line(tmp_path, capsys):
    save("runs/first")
    exported("runs/first")
    whole = (tmp_path / "exports/first/model.safetensors").read_bytes()
    (tmp_path / "exports/first/model.safetensors").write_bytes(whole[:1000])
    assert "exports/first: SafetensorError" in error(capsys, "exports/first")


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    save("runs/first")
    exported("runs/first")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'cleanrl-distributed[video]'" in error(capsys, "runs/first", "--capture-video")
    assert "pip install 'cleanrl-distributed[hub]'" in error(capsys, "exports/first")
    assert "pip install 'cleanrl-distributed[hub]'" in refused(capsys, "runs/first")
