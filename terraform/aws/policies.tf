# IAM policies of jobs, as documents to attach to their roles.

locals {
  objects = "${aws_s3_bucket.this.arn}/${var.prefix == "" ? "" : "${var.prefix}/"}*"
}

data "aws_iam_policy_document" "training" {
  statement {
    sid       = "SaveAndLoad"
    actions   = ["s3:GetObject", "s3:PutObject"]
    resources = [local.objects]
  }

  # Granted not for listing: without this grant S3 answers a GET of an absent object with 403 instead of 404, and a first
  # save could not tell an absent checkpoint from a denied one. A condition on s3:prefix would undo that, since a GET has
  # no such key.
  statement {
    sid       = "AbsentInsteadOfDenied"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.this.arn]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "UseKey"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

data "aws_iam_policy_document" "janitor" {
  source_policy_documents = [data.aws_iam_policy_document.training.json]

  statement {
    sid       = "Delete"
    actions   = ["s3:DeleteObject"]
    resources = [local.objects]
  }
}
