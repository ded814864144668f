output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id
}

output "arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "url" {
  description = "URL for checkpoints: RemoteWriter(\"<url>/<name>\")."
  value       = join("/", compact(["s3:/", aws_s3_bucket.this.id, var.prefix]))
}

output "training_policy_json" {
  description = "IAM policy of jobs that save and load, and delete nothing."
  value       = data.aws_iam_policy_document.training.json
}

output "janitor_policy_json" {
  description = "IAM policy of jobs that retire checkpoints and delete orphans: training's policy, and deletion."
  value       = data.aws_iam_policy_document.janitor.json
}
