"""The AWS module is formatted and valid, and makes the bucket that its README describes.

`terraform` itself judges, with a provider from a local mirror: nothing is downloaded, and where either is missing the
tests are skipped with that reason. The bucket is made on moto's server and looked at with boto3.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

MODULE = Path(__file__).parent.parent / "terraform" / "aws"
TERRAFORM = shutil.which("terraform")
# Validating starts the provider, a program of several hundred megabytes, from a cold disk.
TERRAFORM_TIMEOUT_SECONDS = 120

# The module against a server on this machine: credentials that mean nothing, and no question to AWS.
ROOT = """
provider "aws" {{
  region                      = "us-east-1"
  access_key                  = "none"
  secret_key                  = "none"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
  skip_region_validation      = true

  endpoints {{
    s3 = "{endpoint_url}"
  }}
}}

module "checkpoints" {{
  source = "{module}"
  bucket = "checkpoints"
  prefix = "team-a"
}}

output "url" {{
  value = module.checkpoints.url
}}

output "training" {{
  value = module.checkpoints.training_policy_json
}}

output "janitor" {{
  value = module.checkpoints.janitor_policy_json
}}
"""


# All but the lifecycle.
APPLIED = [
    "aws_s3_bucket_ownership_controls.this",
    "aws_s3_bucket_policy.this",
    "aws_s3_bucket_server_side_encryption_configuration.this",
    "aws_s3_bucket_versioning.this",
    "data.aws_iam_policy_document.janitor",
]


def mirrors() -> Iterable[Path]:
    """Return where a mirror of providers may lie: a folder that holds `registry.terraform.io/hashicorp/aws`."""
    if "TF_PLUGIN_MIRROR" in os.environ:
        yield Path(os.environ["TF_PLUGIN_MIRROR"])
    if TERRAFORM:
        for folder in Path(TERRAFORM).resolve().parents:
            yield folder / "plugins"
            yield folder / "share" / "terraform" / "plugins"
    yield Path.home() / ".terraform.d" / "plugins"
    yield Path("/usr/share/terraform/plugins")
    yield from sorted(Path("/opt").glob("*"))


MIRROR = next((folder for folder in mirrors() if (folder / "registry.terraform.io/hashicorp/aws").is_dir()), None)

needs_terraform = pytest.mark.skipif(TERRAFORM is None, reason="terraform is not on PATH")
needs_provider = pytest.mark.skipif(
    TERRAFORM is None or MIRROR is None,
    reason="no terraform, or no local mirror of the AWS provider (TF_PLUGIN_MIRROR can name one)",
)


def terraform(*arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    assert TERRAFORM is not None
    result = subprocess.run(
        [TERRAFORM, f"-chdir={folder}", *arguments],
        env={**os.environ, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=TERRAFORM_TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"terraform {' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since terraform writes beside what it reads."""
    return shutil.copytree(
        MODULE, tmp_path_factory.mktemp("terraform") / "aws", ignore=shutil.ignore_patterns(".terraform*")
    )


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a terraform that knows the mirror and no other source of providers."""
    settings = tmp_path_factory.mktemp("settings") / "terraform.rc"
    settings.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{MIRROR}"\n  }}\n}}\n')
    return {"TF_CLI_CONFIG_FILE": str(settings)}


@pytest.fixture(scope="module")
def initialized(module: Path, offline: Mapping[str, str]) -> Path:
    """The module, with its provider."""
    terraform("init", "-backend=false", "-input=false", folder=module, environment=offline)
    return module


@pytest.fixture
def root(module: Path, offline: Mapping[str, str], tmp_path: Path, s3: Any) -> Path:
    """A configuration that makes the bucket on the server, with its provider."""
    (tmp_path / "main.tf").write_text(ROOT.format(endpoint_url=s3.meta.endpoint_url, module=module))
    terraform("init", "-input=false", folder=tmp_path, environment=offline)
    return tmp_path


@pytest.fixture
def s3() -> Iterator[Any]:
    """A client of a server of its own, in a thread that ends with the test."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
        )
        yield client
        client.close()
    finally:
        server.stop()


@needs_terraform
def test_every_file_is_formatted() -> None:
    """`terraform fmt -check`, which names the files that are not."""
    terraform("fmt", "-check", "-recursive", folder=MODULE.parent)


@pytest.mark.torture(smoke=False)
@needs_provider
def test_module_and_example_are_valid(initialized: Path, offline: Mapping[str, str]) -> None:
    """`terraform validate`, which checks every argument against the provider's own schema."""
    example = initialized / "examples" / "training"
    terraform("init", "-backend=false", "-input=false", folder=example, environment=offline)
    for folder in (initialized, example):
        verdict = json.loads(terraform("validate", "-json", folder=folder, environment=offline))
        assert verdict["valid"]
        assert verdict["diagnostics"] == []


@pytest.mark.torture(smoke=False)
@needs_provider
def test_bucket_is_as_the_readme_says(root: Path, offline: Mapping[str, str], s3: Any) -> None:
    """Applied on moto, all but the lifecycle; then the rows of the README's tables are asked of server and outputs."""
    targets = [f"-target=module.checkpoints.{name}" for name in APPLIED]
    terraform("apply", "-auto-approve", "-input=false", *targets, folder=root, environment=offline)
    outputs = json.loads(terraform("output", "-json", folder=root, environment=offline))

    assert outputs["url"]["value"] == "s3://checkpoints/team-a"
    assert set(s3.get_public_access_block(Bucket="checkpoints")["PublicAccessBlockConfiguration"].values()) == {True}
    (ownership,) = s3.get_bucket_ownership_controls(Bucket="checkpoints")["OwnershipControls"]["Rules"]
    assert ownership["ObjectOwnership"] == "BucketOwnerEnforced"
    (encryption,) = s3.get_bucket_encryption(Bucket="checkpoints")["ServerSideEncryptionConfiguration"]["Rules"]
    assert encryption["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    assert "Status" not in s3.get_bucket_versioning(Bucket="checkpoints")
    (tls_only,) = json.loads(s3.get_bucket_policy(Bucket="checkpoints")["Policy"])["Statement"]
    assert tls_only["Effect"] == "Deny"
    assert tls_only["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}

    assert verbs(outputs["training"]["value"]) == {
        ("s3:GetObject", "arn:aws:s3:::checkpoints/team-a/*"),
        ("s3:PutObject", "arn:aws:s3:::checkpoints/team-a/*"),
        ("s3:ListBucket", "arn:aws:s3:::checkpoints"),
    }
    assert verbs(outputs["janitor"]["value"]) - verbs(outputs["training"]["value"]) == {
        ("s3:DeleteObject", "arn:aws:s3:::checkpoints/team-a/*")
    }


@pytest.mark.torture(smoke=False)
@needs_provider
def test_no_lifecycle_rule_expires_a_live_shard(root: Path, offline: Mapping[str, str]) -> None:
    """Read from the plan, since applying a lifecycle waits for most of a minute until S3 would have spread it."""
    terraform("plan", "-out=plan", "-input=false", folder=root, environment=offline)
    plan = json.loads(terraform("show", "-json", "plan", folder=root, environment=offline))
    (module,) = plan["planned_values"]["root_module"]["child_modules"]
    (lifecycle,) = [r["values"] for r in module["resources"] if r["type"] == "aws_s3_bucket_lifecycle_configuration"]
    rules = {rule["id"]: rule for rule in lifecycle["rule"]}

    aborting = rules["abort-incomplete-multipart-uploads"]
    assert aborting["abort_incomplete_multipart_upload"] == [{"days_after_initiation": 3}]
    expirations = [expiration for rule in rules.values() for expiration in rule["expiration"]]
    assert [expiration["expired_object_delete_marker"] for expiration in expirations] == [True]
    assert not any(expiration.get("days") or expiration.get("date") for expiration in expirations)
    assert not any(rule["transition"] for rule in rules.values())


@pytest.mark.torture(smoke=False)
@needs_provider
@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": "Upper", "prefix": "/a", "kms_key_arn": "alias/mine", "versioning": "On", "noncurrent_days": "0"},
        {"bucket": "with.dots", "prefix": "a/", "abort_multipart_days": "1.5"},
        {"prefix": "a*"},
    ],
)
def test_wrong_arguments_are_refused(initialized: Path, offline: Mapping[str, str], wrong: dict[str, str]) -> None:
    """Each breaks one rule of variables.tf, and the plan names every variable with a wrong value, and no other."""
    arguments = [f"-var={name}={value}" for name, value in {"bucket": "checkpoints", **wrong}.items()]
    with pytest.raises(AssertionError, match="Invalid value for variable") as refusal:
        terraform("plan", "-no-color", "-input=false", *arguments, folder=initialized, environment=offline)
    assert set(re.findall(r"on variables.tf line \d+:\s+\d+: variable \"(\w+)\"", str(refusal.value))) == set(wrong)


def verbs(policy: str) -> set[tuple[str, str]]:
    """(action, resource) of every statement, all of which allow."""
    statements: list[dict[str, Any]] = json.loads(policy)["Statement"]
    assert {statement["Effect"] for statement in statements} == {"Allow"}
    return {
        (action, statement["Resource"])
        for statement in statements
        for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }
