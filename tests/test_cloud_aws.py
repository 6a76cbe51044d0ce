"""Batch job definitions against CloudFormation's schema and rules, by cfn-lint."""

import json

import pytest

from cleanrl_utils import submit_exp

pytestmark = pytest.mark.cloud
api = pytest.importorskip("cfnlint.api")

ROLE = "arn:aws:iam::123456789012:role/execution"
FULL = ["--wandb-secret", "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"]
FULL += ["--execution-role-arn", ROLE, "--job-role-arn", ROLE, "--num-gpu", "4", "--shm-size", "2000"]


def pascal(value):
    """CloudFormation's spelling of the API's fields."""
    if isinstance(value, dict):
        return {
            name if name.startswith("awslogs") else name[0].upper() + name[1:]: pascal(each)
            for name, each in value.items()
        }
    return [pascal(each) for each in value] if isinstance(value, list) else value


def problems(*words, change=None):
    argv = ["--provider", "aws", "--command", "python a.py", "--docker-tag", "me/x:1", "--job-queue", "q", *words]
    (spec,) = submit_exp.make_specs(submit_exp.parse(submit_exp.Args, argv), "a-1")
    document = submit_exp.provider_of("aws").render(spec)
    properties = pascal({**document["definition"], "retryStrategy": document["job"]["retryStrategy"]})
    properties |= {"Timeout": pascal(document["job"]["timeout"])} if "timeout" in document["job"] else {}
    if change:
        change(properties)
    resources = {"Job": {"Type": "AWS::Batch::JobDefinition", "Properties": properties}}
    template = {"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}
    found = api.lint(json.dumps(template), regions=["us-east-1"])
    return [str(each) for each in found]


@pytest.mark.parametrize("words", [[], FULL, [*FULL, "--num-nodes", "2"], ["--num-hours", "1"]])
def test_definitions_satisfy_cfn_lint(words):
    assert problems(*words) == []


def test_cfn_lint_would_say_so():
    assert problems(change=lambda p: p["ContainerProperties"].update(Imag="x"))
    assert problems(change=lambda p: p["RetryStrategy"].update(Attempts="many"))
