variable "bucket" {
  description = "Name of the bucket, unique among all buckets of S3."
  type        = string

  validation {
    # No dots: a name with dots does not match the certificate of *.s3.amazonaws.com.
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A bucket's name is 3 to 63 lower-case letters, digits and hyphens, and begins and ends with a letter or digit."
  }
}

variable "prefix" {
  description = "Prefix that the IAM policies are confined to, such as \"team-a\"; empty for the whole bucket."
  type        = string
  default     = ""

  validation {
    # `*` and `?` would be wildcards in the policies.
    condition     = can(regex("^$|^[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*$", var.prefix))
    error_message = "A prefix is empty, or names of letters, digits and _.=- joined by /, without a slash at either end."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the objects; null for S3's own keys (SSE-S3), which cost nothing."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "The ARN of a key, arn:aws:kms:<region>:<account>:key/<id>: IAM policies cannot grant the use of a key by its alias."
  }
}

variable "versioning" {
  description = "Disabled, Enabled, or Suspended for a bucket that once had it. See the README for why the default is Disabled."
  type        = string
  default     = "Disabled"

  validation {
    condition     = contains(["Disabled", "Enabled", "Suspended"], var.versioning)
    error_message = "One of Disabled, Enabled, Suspended."
  }
}

variable "noncurrent_days" {
  description = "Days after which a deleted or replaced version is removed; matters only if versions are or were kept."
  type        = number
  default     = 7

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "A whole number of days, at least 1."
  }
}

variable "abort_multipart_days" {
  description = "Days after which an unfinished multipart upload is removed."
  type        = number
  default     = 3

  validation {
    condition     = var.abort_multipart_days >= 1 && floor(var.abort_multipart_days) == var.abort_multipart_days
    error_message = "A whole number of days, at least 1."
  }
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket that still holds checkpoints."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of the bucket."
  type        = map(string)
  default     = {}
}
