"""Push and pull of drafters, with huggingface_hub's client and a local server with its API."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants

from outrider.data.files import sha256_file
from outrider.data.hub_client import BoundedClient
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.medusa import Medusa
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.saved.build import starting_weights
from outrider.models.drafters.saved.download import resolve_drafter
from outrider.models.drafters.saved.folder import record_weights
from outrider.models.export.hub import pull, push

from ...commands import invoke
from .hub_server import READER, WRITER, Hub, serving

# huggingface_hub itself uploads this way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

REPO = "user/drafter"
# The command `push` and transformers' `generate`, in a process that finds the Hub by HF_ENDPOINT
# alone.
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from outrider.cli.main import run_command
folder, target, repo = sys.argv[1:]
run_command(["push", folder, repo, "--public"])
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
inputs = {"input_ids": torch.tensor([[1, 70, 71, 72, 2]]), "max_new_tokens": 12, "do_sample": False}
tokens = model.generate(**inputs, custom_generate=repo, trust_remote_code=True)
assert torch.equal(tokens, model.generate(**inputs)), tokens
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Start a new Hub for each test, with a token that may write and an empty cache."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield server


@pytest.fixture
def folder(package_dirs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(package_dirs["redrafter"], tmp_path / "package"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_pushed_folder_is_pulled_byte_for_byte(hub: Hub, folder: Path, tmp_path: Path) -> None:
    pushed = push(folder, REPO)
    assert (pushed.private, hub.repositories[REPO].private) == (True, True)
    assert set(pushed.added) == content(folder).keys()
    # Weights go through the protocol for large files.
    assert list(hub.objects.values()) == [(folder / "model.safetensors").read_bytes()]
    assert pull(REPO, tmp_path / "pulled") == pushed.commit
    assert content(tmp_path / "pulled") == content(folder)
    # A second push of equal files commits nothing.
    second = push(folder, REPO)
    assert (second.added, second.deleted, second.commit) == ([], [], pushed.commit)
    assert len(hub.repositories[REPO].commits) == 2, "the Hub's own and ours"


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_a_branch_with_other_content_is_overwritten_only_with_the_option(hub: Hub, folder: Path, name: str) -> None:
    push(folder, REPO)
    before = dict(hub.repositories[REPO].branches)
    if name == "README.md":
        (folder / name).write_text("# Another\n")
    else:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)
        record_weights(folder)
    changed = ["config.json", name] if name == "model.safetensors" else [name]
    with pytest.raises(
        ValueError, match=f"holds other files than .*: {', '.join(changed)}. Push to a new branch .*--overwrite"
    ):
        push(folder, REPO)
    assert hub.repositories[REPO].branches == before
    assert sorted(push(folder, REPO, overwrite=True).added) == changed


def test_files_of_other_users_are_deleted_only_with_overwrite(hub: Hub, folder: Path) -> None:
    hub.make(REPO, {"pytorch_model.bin": b"theirs"})
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        push(folder, REPO)
    assert "pytorch_model.bin" in hub.repositories[REPO].commits[hub.repositories[REPO].branches["main"]]
    assert push(folder, REPO, overwrite=True).deleted == ["pytorch_model.bin"]


def test_a_new_branch_holds_the_folder_alone_and_main_stays(hub: Hub, folder: Path) -> None:
    hub.make(REPO, {"README.md": b"theirs", "other.bin": b"theirs"}, private=True)
    main = hub.repositories[REPO].branches["main"]
    pushed = push(folder, REPO, revision="v2")
    assert hub.repositories[REPO].branches == {"main": main, "v2": pushed.commit}
    assert hub.repositories[REPO].commits[pushed.commit].keys() - {".gitattributes"} == content(folder).keys()


def test_a_branch_left_by_a_failed_push_is_completed_by_the_next(hub: Hub, folder: Path) -> None:
    """It holds main's files, as any new branch does. A branch with a commit of its own stays."""
    hub.make(REPO, {"README.md": b"theirs"})
    main = hub.repositories[REPO].branches["main"]
    hub.refused["/commit/"] = 403
    with pytest.raises(ValueError, match="HTTP 403"):
        push(folder, REPO, revision="v2")
    assert hub.repositories[REPO].branches == {"main": main, "v2": main}
    hub.refused.clear()
    pushed = push(folder, REPO, revision="v2")
    assert hub.repositories[REPO].branches == {"main": main, "v2": pushed.commit}
    (folder / "README.md").write_text("# Another\n")
    with pytest.raises(ValueError, match="holds other files"):
        push(folder, REPO, revision="v2")


def test_a_concurrent_commit_is_not_overwritten(hub: Hub, folder: Path) -> None:
    """The other commit happens after the push has read the branch."""
    repository = hub.make(REPO)

    class Racing(dict[str, bytes]):
        def __setitem__(self, oid: str, data: bytes) -> None:
            super().__setitem__(oid, data)
            repository.commit("main", {"theirs.txt": b"new"})

    hub.objects = Racing()
    with pytest.raises(ValueError, match="HTTP 412: the branch has changed since the command read it"):
        push(folder, REPO)
    assert repository.commits[repository.branches["main"]] == {"theirs.txt": b"new"}


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "HTTP 401: the Hub doesn't know who you are: log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_made_up", "HTTP 401: the Hub doesn't know who you are"),
        ("hf_made_\u00fcp", "the token has characters that no token has: copy it again"),
        (READER, "HTTP 403: your token may not do this"),
    ],
)
def test_an_invalid_token_is_an_error_that_never_shows_it(hub, folder, monkeypatch, caplog, token, message):
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match=message) as error:
        push(folder, REPO)
    assert REPO not in hub.repositories
    assert error.value.__cause__ is None or not isinstance(error.value.__cause__, UnicodeError), "it would hold the token"
    for secret in (READER, WRITER, "hf_made"):
        assert secret not in caplog.text + str(error.value)


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        ("/commit/", 403, "HTTP 403: your token may not do this"),
        ("/preupload/", 409, "HTTP 409: the repository exists already"),
        ("/objects/", 403, "HTTP 403"),
        ("/api/repos/create", 400, "HTTP 400: the Hub answers"),
    ],
)
def test_an_http_error_during_a_push_leaves_no_partial_commit(hub, folder, part, status, message):
    hub.refused[part] = status
    with pytest.raises(ValueError, match=message):
        push(folder, REPO)
    repository = hub.repositories.get(REPO)
    assert repository is None or set(repository.commits[repository.branches["main"]]) == {".gitattributes"}


def test_the_hubs_message_of_an_unexpected_error_is_shown_without_secrets(hub, folder):
    hub.refused["/preupload/"] = 402
    hub.message = "storage limit reached; see https://hub/settings?token=secret"
    with pytest.raises(ValueError, match="HTTP 402: the Hub answers: storage limit reached") as error:
        push(folder, REPO)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("error_text", "message"),
    [
        ("HTTP status client error (403 Forbidden), domain: https://x/y?signature=secret", "HTTP 403: your token may not do"),
        ("HTTP status server error (503 Unavailable)", "HTTP 503: the Hub answers: HTTP status server error"),
        ("no route to host cas.xet:443", "the connection to the Hub broke .ConnectionError"),
    ],
)
def test_an_error_of_the_large_file_upload_is_shown_by_its_status(hub, folder, monkeypatch, error_text, message):
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError(error_text)

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", refuse)
    with pytest.raises(ValueError, match=message) as error:
        push(folder, REPO)
    assert "secret" not in str(error.value)


def test_an_unreachable_hub_is_an_error_with_the_remedy(hub, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the connection to the Hub broke .*check the network"):
        push(folder, REPO)
    with pytest.raises(ValueError, match="can't be reached|connection to the Hub broke"):
        pull(REPO, tmp_path / "pulled")
    with pytest.raises(ValueError, match="there is no local folder user/drafter, .* isn't in the cache"):
        resolve_drafter(REPO)


def test_a_push_in_offline_mode_is_an_error(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        push(folder, REPO)
    assert not hub.requests


def test_a_missing_repository_revision_or_drafter_is_an_error(hub, tmp_path):
    with pytest.raises(ValueError, match="user/nothing: HTTP 404: there is no such repository, or it is private"):
        pull("user/nothing", tmp_path / "pulled")
    hub.make(REPO)
    with pytest.raises(ValueError, match="user/drafter has no branch, tag or commit v9"):
        pull(REPO, tmp_path / "pulled", "v9")
    with pytest.raises(ValueError, match="^user/drafter at commit [0-9a-f]{40} holds no drafter"):
        pull(REPO, tmp_path / "pulled")
    assert not list(tmp_path.glob("pulled*")) + list(tmp_path.glob(".pulled*"))


def test_a_pull_into_a_folder_with_files_is_an_error(hub, folder):
    with pytest.raises(ValueError, match="exists already"):
        pull(REPO, folder)
    assert not hub.requests


# --- drafters by their name on the Hub


def test_a_drafter_is_loaded_from_the_hub_without_its_code(hub, folder, tiny_target):
    pushed = push(folder, REPO, public=True)
    assert (pushed.private, hub.repositories[REPO].private) == (False, False)
    hub.requests.clear()
    there, here = load_drafter(REPO, tiny_target, beam_width=2), load_drafter(folder, tiny_target)
    assert there.config.beam_width == 2
    assert all(torch.equal(tensor, here.state_dict()[name]) for name, tensor in there.state_dict().items())
    fetched = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"config.json", "model.safetensors"}


def test_a_revision_on_the_hub_may_hold_another_kind_of_drafter(hub, folder, package_dirs, tiny_target):
    push(folder, REPO)
    heads = push(package_dirs["medusa"], REPO, revision="heads").commit
    assert resolve_drafter(f"{REPO}@heads").name == resolve_drafter(REPO, "heads").name == heads
    assert resolve_drafter(REPO).name == hub.repositories[REPO].branches["main"] != heads
    assert type(load_drafter(REPO, tiny_target, beam_width=2)) is Redrafter
    assert type(load_drafter(REPO, tiny_target, revision="heads")) is Medusa


def test_training_starts_from_a_drafter_on_the_hub(hub, folder, tiny_target):
    push(folder, REPO)
    started, there = build_drafter(parse_drafter({"start_from": REPO}), tiny_target), load_drafter(folder, tiny_target)
    assert all(torch.equal(tensor, there.state_dict()[name]) for name, tensor in started.state_dict().items())
    assert starting_weights(parse_drafter({"start_from": f"{REPO}@main"})) == sha256_file(folder / "model.safetensors")


def test_tuning_a_drafter_on_the_hub_is_an_error_before_any_work(hub, tmp_path):
    result = invoke(["tune", "--target", "no/target", "--drafter", REPO, "--output", str(tmp_path)])
    assert "`outrider pull user/drafter --output DIR` and tune DIR" in result.message
    assert not hub.requests


def test_an_existing_folder_is_preferred_to_a_name_on_the_hub(hub, tmp_path, monkeypatch):
    (tmp_path / "user" / "drafter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_drafter("user/drafter") == Path("user/drafter")
    assert resolve_drafter("/no/such/folder") == Path("/no/such/folder")
    assert not hub.requests
    with pytest.raises(ValueError, match="there is no local folder outputs/drafter, .* HTTP 404"):
        resolve_drafter("outputs/drafter")


@pytest.mark.slow
def test_the_command_pushes_and_transformers_decodes_from_the_hub(folder: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    with serving() as server:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": WRITER}
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), str(tiny_target_dir), "user/some-drafter.v1"],
            env={**environment, "HF_HUB_DISABLE_XET": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert WRITER not in result.stdout + result.stderr
        assert server.repositories["user/some-drafter.v1"].commits
        fetched = [request for request in server.requests if "/resolve/" in request]
        assert any(request.endswith("/model.safetensors") for request in fetched)


@pytest.mark.parametrize("moment", ["after the weights", pytest.param("after the commit", marks=pytest.mark.slow)])
def test_a_push_that_is_killed_leaves_no_half_and_is_completed_by_the_next(hub, folder, tmp_path, moment):
    before = content(folder)

    def kill(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def send_until_commit(client: BoundedClient, request: Any, **options: Any) -> Any:
        return kill() if "/commit/" in request.url.path else send(client, request, **options)

    # 1. The killed push, in a forked process.
    send, upload = BoundedClient.send, HfApi.upload_folder
    if (pid := os.fork()) == 0:
        if moment == "after the weights":
            BoundedClient.send = send_until_commit  # no commit names the uploaded weights
        else:
            HfApi.upload_folder = lambda *args, **options: kill(upload(*args, **options))
        try:
            push(folder, REPO, revision="v2")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert content(folder) == before
    # 2. The repository has a whole commit, or none of this push.
    repository = hub.repositories[REPO]
    for files in repository.commits.values():
        assert files.keys() - {".gitattributes"} in (set(), before.keys())
    assert bool(hub.objects) == (moment != "before the commit")
    # 3. The next push completes it.
    pushed = push(folder, REPO, revision="v2")
    assert repository.branches["v2"] == pushed.commit
    assert repository.commits[pushed.commit].keys() - {".gitattributes"} == before.keys()
    assert bool(pushed.added) == (moment != "after the commit")
    assert pull(REPO, tmp_path / "pulled", "v2") == pushed.commit
    assert content(tmp_path / "pulled") == before
