"""examples/clusters: what can be checked of them without a cluster, and without what only they need."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/clusters"
BUCKET, IMAGE = "s3://my-bucket/run-1", "registry.example/diloco"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def instructions():
    """(instruction, words) of the Containerfile."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE)
    return [tuple(line.split(" ", 1)) for line in text.splitlines()]


def test_the_page_names_every_file():
    text = (ROOT / "docs/clusters.md").read_text()
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)) == {path.name for path in FOLDER.iterdir()} - {
        "README.md"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["member.sh", "slurm.sbatch"])
def test_a_script_without_bucket_or_name_says_what_to_give(name):
    for given, missing in (({}, "BUCKET"), ({"BUCKET": BUCKET}, "MEMBER")):
        done = subprocess.run(["bash", FOLDER / name], env={"PATH": "/usr/bin:/bin"} | given, capture_output=True,
                              text=True)  # fmt: skip
        assert done.returncode != 0 and re.search(rf"{missing}: give .*, as ", done.stderr)


@pytest.mark.slow
def test_slurm_tells_the_member_before_its_end_and_queues_again_only_what_was_stopped(tmp_path):
    """With stand-ins for srun and scontrol: the exit code decides."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/said\nexit ${{CODE_{name}:-0}}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BUCKET": BUCKET, "MEMBER": "lab", "SLURM_NTASKS": "8",
                   "SLURM_JOB_ID": "7"}  # fmt: skip
    trains = f"srun --kill-on-bad-exit=1 diloco train --bucket {BUCKET} --member lab --shards 8 --model 1b"
    for code, expected in ((0, [trains]), (1, [trains]), (130, [trains, "scontrol requeue 7"])):
        (tmp_path / "said").unlink(missing_ok=True)
        done = subprocess.run(["bash", FOLDER / "slurm.sbatch", "--model", "1b"],
                              env=environment | {"CODE_srun": str(code)})  # fmt: skip
        assert done.returncode == code and (tmp_path / "said").read_text().splitlines() == expected
    options = re.findall(r"^#SBATCH (\S+)", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=TERM@300", "--open-mode=append"} <= set(options)
    assert "--ntasks-per-node=8" in options and "--gpus-per-node=8" in options


def test_members_of_skypilot_are_in_two_regions_and_share_a_bucket():
    header, *tasks = documents("skypilot.yaml")
    assert header == {"name": "diloco", "execution": "parallel", "inter_connection": False}  # apart from each other
    for task in tasks:
        assert set(task) == {"name", "resources", "envs", "secrets", "run"}
        assert set(task["resources"]) == {"infra", "accelerators", "use_spot", "image_id"}
        assert task["envs"] == {"BUCKET": BUCKET, "MEMBER": task["name"]}
        assert task["resources"]["image_id"] == f"docker:{IMAGE}" and shlex.split(task["run"])[0] == "diloco-member"
        assert set(task["secrets"].values()) == {None}  # given when it is launched, never written down
    assert len({task["resources"]["infra"] for task in tasks}) == len({task["name"] for task in tasks}) == 2
    assert len({task["resources"]["accelerators"] for task in tasks}) == 1  # as many shards


def test_members_on_kubernetes_have_names_of_their_own_and_share_a_bucket():
    (jobset,), (trainjob,) = documents("jobset.yaml"), documents("trainjob.yaml")
    jobs = jobset["spec"]["replicatedJobs"]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    containers = [pod["containers"][0] for pod in pods] + [trainjob["spec"]["trainer"]]
    given = [{each["name"]: each.get("value") for each in container["env"]} for container in containers]
    assert {each["BUCKET"] for each in given} == {BUCKET} and {container["image"] for container in containers} == {
        IMAGE
    }
    assert [each["MEMBER"] for each in given] == ["east", "west", "east"] == [job["name"] for job in jobs] + ["east"]
    assert len({pod["nodeSelector"]["topology.kubernetes.io/zone"] for pod in pods}) == 2
    assert all(pod["restartPolicy"] == "OnFailure" for pod in pods)  # it comes back, and the others are left alone
    assert trainjob["spec"]["trainer"]["command"] == ["diloco-member"]


def test_the_image_gets_all_that_the_package_is_built_from():
    copied = [source for kind, words in instructions() if kind == "COPY" for source in words.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    needed = {"pyproject.toml", "diloco", hook, project["project"]["readme"], *project["project"]["license-files"]}
    assert needed <= set(copied)
    (install,) = [words for kind, words in instructions() if kind == "RUN" and "pip install" in words]
    extras = re.search(r"'\.\[(.*)\]'", install)[1].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"]) and "bucket" in extras
    assert instructions()[-1] == ("ENTRYPOINT", '["diloco-member"]')
