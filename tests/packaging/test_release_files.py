"""Files that only a code host or a container engine reads: they parse, and everything that they name exists."""

import json
import re
import shlex
import tomllib

import pytest
import yaml

from tests.readme.pages import ROOT, guides, read
from tests.readme.test_page_links import anchors
from thinpipe.cli.parsing import parse

PROJECT = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
HOME = "https://github.com/thinpipe/thinpipe"
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WRITTEN_BY_PEOPLE = [*guides(), *GITHUB.rglob("*.yml"), *GITHUB.rglob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("*.md")]


def load(path):
    return yaml.safe_load(read(path))


def jobs(workflow):
    return load(workflow)["jobs"].items()


def steps(workflow):
    return [step for _, job in jobs(workflow) for step in job["steps"]]


def thinpipe_commands(script):
    """Words after `thinpipe` of every command of a shell script."""
    script = re.sub(r"\\\n|\n", lambda found: " " if found[0] == "\\\n" else " ; ", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&<>"):
            words = words[1:] if words[:1] == ["exec"] else words[2:] if words[:2] == ["then", "exec"] else words
            if words[:1] == ["thinpipe"] and words[1:]:
                yield words[1:]
            words = []
        else:
            words.append(word)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_limits_and_rights(workflow):
    assert load(workflow)["permissions"] == {"contents": "read"}, "what a job may write, it says itself"
    for name, job in jobs(workflow):
        assert job["timeout-minutes"] <= 90, name
        assert set([job["needs"]] if "needs" in job else []) <= set(dict(jobs(workflow))), name
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1")), step


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(workflow):
    scripts = [step["run"] for step in steps(workflow) if "run" in step]
    assert scripts
    for script in scripts:
        for name in re.findall(r"(?<![\w/-])(?:\.ci|docs|tests|examples)/[\w./-]+", script):
            assert (ROOT / name).exists(), name
        for extras in re.findall(r"\.\[([\w,]+)\]", script):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        for words in thinpipe_commands(script):
            parse(words)


def test_every_python_that_is_promised_is_tried():
    promised = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    tried = load(GITHUB / "workflows/ci.yml")["jobs"]["systems"]["strategy"]["matrix"]["python"]
    assert {min(promised, key=version), max(promised, key=version)} <= set(tried) <= promised
    assert PROJECT["requires-python"] == f">={min(promised, key=version)}"


def version(text):
    return [int(part) for part in text.split(".")]


def test_a_release_is_checked_published_without_a_token_and_attested():
    workflow = GITHUB / "workflows/release.yml"
    (pattern,) = load(workflow)[True]["push"]["tags"]  # YAML reads `on` as true
    assert pattern.startswith("v")
    named = dict(jobs(workflow))
    assert (named["publish"]["needs"], named["image"]["needs"]) == ("build", "publish")
    build = " ".join(step.get("run", "") for step in named["build"]["steps"])
    assert all(word in build for word in ("bash .ci/run", "twine check --strict", "GITHUB_REF_NAME"))
    for name in ("publish", "image"):
        assert named[name]["permissions"].items() >= {"id-token": "write", "attestations": "write"}.items()
        assert any("attest-build-provenance" in step.get("uses", "") for step in named[name]["steps"])
    (publish,) = (step for step in named["publish"]["steps"] if "pypi-publish" in step["uses"])
    assert "with" not in publish, "trusted publishing takes no password"
    secrets = re.findall(r"secrets\.(\w+)", read(workflow))
    assert set(secrets) == {"GITHUB_TOKEN"}


def test_the_image_is_built_with_arguments_that_it_has():
    (build,) = (step for step in steps(GITHUB / "workflows/release.yml") if "build-push" in step.get("uses", ""))
    given = set(re.findall(r"^(\w+)=", build["with"]["build-args"], re.MULTILINE))
    given |= set(re.findall(r"--build-arg (\w+)=", read(ROOT / "docs/howto/cloud-gpus.md")))
    declared = dict(re.findall(r"^ARG (\w+)=(\S+)$", read(ROOT / "Dockerfile"), re.MULTILINE))
    assert given <= set(declared)
    assert set(declared["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    assert "USER thinpipe" in read(ROOT / "Dockerfile").splitlines()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_has_what_the_host_wants(form):
    content = load(form)
    assert set(content) <= {"name", "description", "title", "labels", "body"}
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
        assert set(field) <= {"type", "id", "attributes", "validations"}


def test_forms_ask_for_the_file_of_the_selftest():
    for name in ("bug", "device"):
        (field,) = (
            field for field in load(GITHUB / f"ISSUE_TEMPLATE/{name}.yml")["body"] if field.get("id") == "selftest"
        )
        assert field["validations"] == {"required": True}
        assert "selftest/selftest.md" in field["attributes"]["description"]
        for command in re.findall(r"`thinpipe (selftest[^`]*)`", json.dumps(field)):
            parse(command.split())


@pytest.mark.usefixtures("folder")
def test_the_compose_file_names_what_exists_and_runs_what_parses():
    compose = load(ROOT / "compose.yaml")
    services = compose["services"]
    assert {"hub", "anna", "bert"} < set(services)
    for name, service in services.items():
        assert (ROOT / service["build"] / "Dockerfile").exists()
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (source.startswith(".") and (ROOT / source).exists()), volume
        script = " ".join(service["command"]).replace("$$(", "$(")
        found = list(thinpipe_commands(script)) if "entrypoint" in service else [service["command"]]
        assert found, name
        for words in found:
            parse(words)
    hub = " ".join(services["hub"]["command"])
    assert "--hub.port 4222" in hub
    assert services["hub"]["ports"] == ["4222:4222"]
    assert "--hub.peers 2" in hub


def test_every_address_of_the_project_is_the_same_and_names_what_exists():
    assert set(PROJECT["urls"]) >= {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(HOME) for url in PROJECT["urls"].values())
    texts = [read(path) for path in {*WRITTEN_BY_PEOPLE, ROOT / "pyproject.toml", *(ROOT / "docs").glob("*.py")}]
    found = {address for text in texts for address in re.findall(r"https?://[^\s)>\"'`]*/thinpipe\b[^\s)>\"'`]*", text)}
    assert len(found) > 5
    for address in found:
        assert address.startswith(HOME), address
        path, _, anchor = re.sub(rf"^{HOME}/?(?:(?:blob|tree)/main/)?", "", address).partition("#")
        if "/main/" in address and "{" not in address:
            assert (ROOT / path).exists(), address
            assert not anchor or anchor in anchors(ROOT / path), address
        for workflow in re.findall(r"/actions/workflows/([\w.]+\.yml)", address):
            assert (GITHUB / "workflows" / workflow).exists(), address


def test_the_citation_is_complete():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "title", "message", "authors", "license", "repository-code"} <= set(citation)
    assert (citation["license"], citation["repository-code"]) == (PROJECT["license"], HOME)
    assert citation["title"] == PROJECT["name"]
