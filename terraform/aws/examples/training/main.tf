# A bucket, and a role for training jobs on EC2 that may save and load there, and delete nothing.

provider "aws" {
  region = "eu-central-1"
}

module "checkpoints" {
  source = "../.."

  bucket = "example-team-checkpoints"
  prefix = "pretraining"
}

data "aws_iam_policy_document" "ec2" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "training" {
  name               = "example-training"
  assume_role_policy = data.aws_iam_policy_document.ec2.json
}

resource "aws_iam_role_policy" "checkpoints" {
  role   = aws_iam_role.training.id
  policy = module.checkpoints.training_policy_json
}

output "url" {
  value = module.checkpoints.url
}
